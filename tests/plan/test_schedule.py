"""Each rank's action list is torch's own, for every schedule; the rules that a schedule has are said with numbers."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.schedule import SCHEDULES, Action, Overlap, action_lists, conflicts, least_micro_batches

pytestmark = pytest.mark.unit

PIPELINES = (2, 3, 4, 8)
CHUNKS = (1, 2, 3)
MICRO_BATCHES = (1, 2, 3, 4, 5, 8, 10, 12, 16, 18)
CELLS = [
    (name, pipeline, chunks, micro_batches)
    for name, pipeline, chunks, micro_batches in itertools.product(SCHEDULES, PIPELINES, CHUNKS, MICRO_BATCHES)
    if not conflicts(name, pipeline, chunks, micro_batches)
]


def torch_schedule(name: str, pipeline: int, chunks: int, micro_batches: int, rank: int = 0):
    from torch.distributed.pipelining import schedules

    classes = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "looped-bfs": schedules.ScheduleLoopedBFS,
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    stages = [
        SimpleNamespace(num_stages=pipeline * chunks, group_size=pipeline, group_rank=rank, submod=None)
        for _ in range(chunks)
    ]
    return classes[name](stages[0] if name in ("gpipe", "1f1b") else stages, micro_batches)


def torch_lists(name: str, pipeline: int, chunks: int, micro_batches: int) -> list[list[str]]:
    """What torch's generator gives, without the ticks in which a rank idles."""
    order = torch_schedule(name, pipeline, chunks, micro_batches).pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in range(pipeline)]


def what_torch_runs(name: str, pipeline: int, micro_batches: int, rank: int) -> list[str]:
    """What the schedules of one chunk do, which run a loop of their own and not their list."""
    ran = []
    schedule = torch_schedule(name, pipeline, 1, micro_batches, rank)
    stage = mock.MagicMock(stage_index=rank, is_last=rank == pipeline - 1)
    stage.forward_one_chunk.side_effect = lambda micro, *_, **__: ran.append(f"{rank}F{micro}")
    stage.backward_one_chunk.side_effect = lambda micro, *_, **__: ran.append(f"{rank}B{micro}")
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ops).return_value = []
    schedule._stage = stage
    with mock.patch.object(schedule, "_initialize_stage"):
        schedule._step_microbatches()
    return ran


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("gpipe", "1f1b")])
def test_each_list_is_the_one_that_torch_generates(name):
    cells = [cell for cell in CELLS if cell[0] == name]
    assert len(cells) >= 10
    for cell in cells:
        assert [[str(action) for action in actions] for actions in action_lists(*cell)] == torch_lists(*cell), cell


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules_of_one_chunk_are_what_torch_runs(name):
    for cell in [cell for cell in CELLS if cell[0] == name]:
        _, pipeline, _, micro_batches = cell
        for rank, actions in enumerate(action_lists(*cell)):
            assert [str(action) for action in actions] == what_torch_runs(name, pipeline, micro_batches, rank), cell


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_every_action_and_can_place_the_transfers(name):
    from torch.distributed.pipelining import schedules

    for cell in [cell for cell in CELLS if cell[0] == name and cell[1] == 4]:
        _, pipeline, chunks, micro_batches = cell
        ours = {
            rank: [schedules._Action.from_str(str(action)) for action in actions]
            for rank, actions in enumerate(action_lists(*cell))
        }
        places = schedules._validate_schedule(ours, pipeline, pipeline * chunks, micro_batches)
        schedules._add_send_recv(ours, stage_to_rank=places.__getitem__, num_stages=pipeline * chunks)  # or raises


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("gpipe", "looped-bfs")])
def test_what_is_refused_is_what_torch_refuses(name):
    chunks = 1 if name == "1f1b" else 2
    for pipeline, micro_batches in itertools.product(PIPELINES, range(1, 20)):
        try:
            torch_schedule(name, pipeline, chunks, micro_batches)
        except ValueError:
            assert conflicts(name, pipeline, chunks, micro_batches), (pipeline, micro_batches)
        else:
            assert not conflicts(name, pipeline, chunks, micro_batches), (pipeline, micro_batches)


def test_an_overlapped_pair_is_one_entry():
    first, second = action_lists("dualpipev", 2, 2, 4)
    assert Overlap(Action(0, "F", 3), Action(3, "B", 1)) in first
    assert str(second[3]) == "2F1"
    assert any(str(entry) == "(2F2;1B0)OVERLAP_F_B" for entry in second)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("1f1b", 4, 1, 3), "takes at least 4 micro-batches per step, not 3; use a smaller micro-batch"),
        (("dualpipev", 4, 2, 7), "takes at least 8 micro-batches per step, not 7"),
        (("gpipe", 4, 2, 8), "gpipe takes exactly 1 chunks per rank, not 2; set chunks = 1"),
        (("zbv", 4, 3, 8), "zbv takes exactly 2 chunks per rank, not 3; set chunks = 2"),
        (("interleaved-1f1b", 4, 1, 8), "interleaved-1f1b takes at least 2 chunks per rank, not 1; set chunks = 2"),
        (
            ("interleaved-zero-bubble", 4, 2, 13),
            "takes 13 micro-batches in 3 equal rounds, and 13 is no multiple of 3; use 12 micro-batches per step, "
            "or any multiple of 4",
        ),
        (("zvb", 4, 2, 8), "no schedule 'zvb'; did you mean 'zbv'"),
    ],
)
def test_a_broken_rule_is_said_with_what_to_change(asked, said):
    with pytest.raises(ConfigError, match=said):
        action_lists(*asked)


def test_the_fewest_micro_batches_are_accepted_and_one_less_is_not():
    for name, pipeline in itertools.product(SCHEDULES, PIPELINES):
        chunks = 1 if name in ("gpipe", "1f1b") else 2
        fewest = least_micro_batches(name, pipeline, chunks)
        assert not conflicts(name, pipeline, chunks, fewest)
        assert fewest == 1 or conflicts(name, pipeline, chunks, fewest - 1)
