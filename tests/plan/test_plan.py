"""A plan comes back from its file as it was, says what differs from another, and lists all that does not fit."""

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.plan import Mesh, Plan

pytestmark = pytest.mark.unit

PLAIN = Plan(global_batch=8, micro_batch=8, accumulation=1)
FULL = Plan(
    mesh=Mesh(pipeline=2, replicate=2, tensor=2),
    schedule="interleaved-1f1b",
    chunks=2,
    cuts=('h.1."odd"\\name', "h.2", "läyer.层"),
    roles={"h.*.attn": "head-wise", 'a "b" = [c] #': "column"},
    sequence_parallel=True,
    shard_level=2,
    recompute="selective",
    cpu_offload=True,
    precision="bf16",
    global_batch=64,
    micro_batch=4,
    accumulation=8,
    clip=0.1,
    bucket_mb=12.5,
    compress="bf16",
    model=("llama\x7f\n8b 4x4",),
)


def plan(**changes) -> Plan:
    return Plan(**{"global_batch": 8, "micro_batch": 1, "accumulation": 8, **changes})


@pytest.mark.parametrize("made", [PLAIN, FULL])
def test_a_plan_comes_back_from_its_file(made, tmp_path):
    assert Plan.from_toml(made.to_toml()) == made
    made.write(tmp_path / "new" / "plan.toml")
    assert Plan.read(tmp_path / "new" / "plan.toml") == made


def test_a_plan_may_be_written_by_hand():
    text = 'mesh = "pipeline=2"\nschedule = "gpipe"\nglobal_batch = 4\nmicro_batch = 1\naccumulation = 4\n'
    assert Plan.from_toml(text) == Plan(
        mesh=Mesh(pipeline=2), schedule="gpipe", global_batch=4, micro_batch=1, accumulation=4
    )


def test_every_field_differs_in_the_full_plan_so_that_none_is_lost_on_the_way():
    assert [name for name in Plan.model_fields if getattr(PLAIN, name) == getattr(FULL, name)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schedul = 'gpipe'", "p.toml: no field 'schedul' in Plan; did you mean 'schedule'"),
        ("schedule = 'pipedream'", "p.toml: schedule = 'pipedream'.*gpipe.*1f1b"),
        ("clip = inf", "p.toml: clip = inf .*should be a finite number"),
        ("bucket_mb = inf", "p.toml: bucket_mb = inf .*should be a finite number"),
        (
            "global_batch = 8",
            "p.toml: micro_batch .expected int. is missing; give it a value\n.*accumulation .*missing",
        ),
        ("[mesh]\ntensr = 2", "p.toml: mesh: no field 'tensr' in Mesh; did you mean 'tensor'"),
        ("mesh = 'tensor=2,tensor=2'", "p.toml: mesh: tensor is given twice"),
        ("mesh = 3", "p.toml: mesh = 3"),
        ("[roles]\n'*.w' = 'col'", "p.toml: roles.* = 'col'.*'column'"),
        ("clip = 0", "p.toml: clip = 0.*greater than 0"),
        ("a b", "p.toml is not TOML"),
    ],
)
def test_a_file_with_faults_is_refused_by_field(text, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        Plan.from_toml(text, "p.toml")


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none.toml cannot be read as a plan: No such file"):
        Plan.read(tmp_path / "none.toml")


def test_the_difference_names_each_field_with_both_values():
    assert PLAIN.diff(PLAIN) == []
    other = PLAIN.model_copy(update={"mesh": Mesh(tensor=2), "clip": 1.0, "precision": "bf16"})
    assert PLAIN.diff(other) == ["mesh: replicate=1 -> tensor=2", "precision: 'fp32' -> 'bf16'", "clip: off -> 1.0"]


def test_plans_that_fit_pass():
    PLAIN.fits()
    PLAIN.fits(workers=1)
    FULL.fits(workers=8)
    plan(mesh=Mesh(pipeline=4), schedule="1f1b", cuts=("a", "b", "c")).fits(4)
    plan(mesh=Mesh(pipeline=2, shard=2), schedule="zbv", chunks=2, accumulation=4).fits(4)


PIPELINE = {"mesh": Mesh(pipeline=4), "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("changes", "workers", "said"),
    [
        (
            {"mesh": Mesh(tensor=2)},
            4,
            "mesh tensor=2 makes 2 ranks, and there are 4 workers; start 2 workers or change",
        ),
        ({"mesh": Mesh(context=2)}, None, "context=2, but sequences cannot be split over ranks yet; set context = 1"),
        ({"mesh": Mesh(pipeline=4)}, None, "pipeline=4 and no schedule; choose one of gpipe, 1f1b"),
        (
            {"schedule": "gpipe"},
            None,
            "schedule = 'gpipe' is for a pipeline, and the mesh has pipeline=1; leave it out",
        ),
        ({"chunks": 2}, None, "chunks = 2 is for a pipeline, and the mesh has pipeline=1"),
        ({"cuts": ("a",)}, None, r"cuts = \('a',\) is for a pipeline"),
        (
            {**PIPELINE, "cuts": ("a", "b")},
            None,
            "2 cuts make 3 stages, and pipeline=4 with chunks = 1 has 4; give 3 cuts",
        ),
        (
            {**PIPELINE, "cuts": ("a", "b", "a")},
            None,
            "cuts name 'a' more than once; each stage begins at its own module",
        ),
        ({**PIPELINE, "chunks": 2}, None, "schedule 1f1b takes exactly 1 chunks per rank, not 2"),
        ({**PIPELINE, "micro_batch": 4, "accumulation": 2}, None, "at least 4 micro-batches per step, not 2"),
        ({**PIPELINE, "schedule": "interleaved-1f1b"}, None, "takes at least 2 chunks per rank, not 1"),
        ({**PIPELINE, "schedule": "zbv", "chunks": 4}, None, "zbv takes exactly 2 chunks per rank, not 4"),
        (
            {**PIPELINE, "schedule": "interleaved-zero-bubble", "chunks": 2, "global_batch": 13, "accumulation": 13},
            None,
            "13 is no multiple of 3; use 12 micro-batches",
        ),
        (
            {**PIPELINE, "schedule": "dualpipev", "chunks": 2, "global_batch": 7, "accumulation": 7},
            None,
            "dualpipev on pipeline=4 takes at least 8 micro-batches per step, not 7",
        ),
        (
            {"roles": {"w": "row"}},
            None,
            "roles = {'w': 'row'} is for a tensor axis, and the mesh has tensor=1; leave it",
        ),
        ({"sequence_parallel": True}, None, "sequence_parallel = True is for a tensor axis"),
        (
            {"mesh": Mesh(replicate=2, shard=2)},
            None,
            r"global_batch = 8, but micro_batch 1 x accumulation 8 x 4 data ranks \(replicate x shard\) is 32; "
            "set accumulation = 2 or global_batch = 32",
        ),
        ({"micro_batch": 3}, None, "is 24; set global_batch = 24"),
    ],
)
def test_what_does_not_fit_together_is_said_with_numbers_and_what_to_change(changes, workers, said):
    with pytest.raises(ConfigError, match=said) as caught:
        plan(**changes).fits(workers)
    assert len(str(caught.value).splitlines()) == 1


def test_all_conflicts_stand_in_one_message():
    wrong = plan(mesh=Mesh(pipeline=4), schedule="zbv", chunks=3, sequence_parallel=True, global_batch=9, cuts=("a",))
    with pytest.raises(ConfigError) as caught:
        wrong.fits(2)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert all(line.startswith("plan: ") for line in lines)
