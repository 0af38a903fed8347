"""A plan's gradient codec: what may be asked, what it carries and sends, and when it pays."""

import pytest

from shoal.cluster.presets import find
from shoal.core.errors import ConfigError
from shoal.plan import explain
from shoal.plan.candidate import Candidate
from shoal.plan.codec import Codec, Matrix, matrix, traffic
from shoal.plan.memory import peak
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.shapes import Shape
from shoal.plan.time import price
from shoal.plan.transformer import profile

pytestmark = pytest.mark.unit
SQUARE, VECTOR = Matrix(1024, 1024), Matrix(1024, 1)


def plan(compress, **changes):
    values = {"mesh": Mesh(replicate=4), "global_batch": 8, "micro_batch": 2, "accumulation": 1, **changes}
    return Plan(**values, compress=compress)


@pytest.mark.parametrize("text", ["bf16", "int8", "topk:0.01", "powersgd:4"])
def test_a_codec_comes_back_as_it_was_written(text):
    assert explain.layout(PLAIN._replace(codec=Codec.parse(text))) == f"replicate=16, 1 x 1, gradients as {text}"
    assert str(Codec.parse(text)) == text
    assert Plan.from_toml(plan(text).to_toml()).compress == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("powersdg:4", "compress = 'powersdg:4': there is no codec 'powersdg'; did you mean 'powersgd'?"),
        ("fp8", "there is no codec 'fp8'"),
        ("bf16:2", "compress = 'bf16:2': bf16 takes no amount; write bf16"),
        (
            "topk",
            "after topk: comes the share of values to send, above 0 and at most 1, found ''; write for ex",
        ),
        ("topk:1.5", "after topk: comes the share of values to send, above 0 and at most 1, found '1.5'"),
        ("topk:nan", "found 'nan'"),
        ("powersgd:0", "after powersgd: comes its rank, a whole number from 1 on, found '0'"),
        ("powersgd:2.5", "found '2.5'"),
        ("powersgd:inf", "found 'inf'"),
    ],
)
def test_what_is_no_codec_is_refused_by_name(text, said):
    with pytest.raises(ConfigError) as error:
        Codec.parse(text)
    assert said in str(error.value)
    assert said in "\n".join(plan(text).contradictions())


@pytest.mark.parametrize(
    ("compress", "changes", "said"),
    [
        ("bf16", {"mesh": Mesh(shard=4)}, "compress = 'bf16', but the mesh is shard=4: .* leave compress out"),
        (
            "topk:0.01",
            {"mesh": Mesh(replicate=2, tensor=2)},
            "of whole weights, and .*tensor=2 divides the model; use repl",
        ),
        ("powersgd:4", {"precision": "fp16"}, "under fp16 each step's gradients have that step's loss scale; use prec"),
        ("topk:0.5", {}, "compress = 'topk:0.5' over 4 replicas sends 2 times as much .* a share below 0.25"),
    ],
)
def test_what_a_codec_does_not_go_with_is_refused(compress, changes, said):
    readers = {"mesh": Mesh(replicate=4), **changes}["mesh"]
    batch = 2 * readers.replicate * readers.shard
    with pytest.raises(ConfigError, match=said):
        plan(compress, **changes, global_batch=batch).fits()
    plan(None, **changes, global_batch=batch).fits()


def test_bf16_goes_with_axes_that_divide_the_model():
    plan("bf16", mesh=Mesh(replicate=2, tensor=2), global_batch=4).fits()
    plan("bf16", precision="fp16").fits()


def test_vectors_small_matrices_and_those_of_which_little_is_spared_travel_as_they_are():
    assert matrix((64, 3, 5, 5)) == Matrix(64, 75) and matrix((7,)) == Matrix(7, 1) and matrix(()) == Matrix(1, 1)
    for text in ("bf16", "int8", "topk:0.01", "powersgd:4"):
        assert Codec.parse(text).carries(SQUARE)
        assert not Codec.parse(text).carries(VECTOR)
        assert not Codec.parse(text).carries(Matrix(16, 16))
    assert Codec.parse("powersgd:256").carries(SQUARE)  # factors of half a million numbers for a million
    assert not Codec.parse("powersgd:257").carries(SQUARE)


@pytest.mark.parametrize(
    ("text", "coded", "kept"),
    [
        ("bf16", 2 * 3 / 4 * 2**21, 0),
        ("int8", 2 * 3 / 4 * 2**20 * (1 + 4 / 256), 2**20),
        ("topk:0.01", 3 * 10486 * 8, 2**20),
        ("powersgd:4", 2 * 3 / 4 * 2 * 4 * 1024 * 4, 2**20 + 4096),
    ],
)
def test_what_a_worker_sends_and_keeps(text, coded, kept):
    """By the formulas of each codec's paper: values and places of k to every other rank, two thin factors, ..."""
    codec = Codec.parse(text)
    found = traffic(codec, [SQUARE, VECTOR], 4, 4)
    assert found.sent_bytes(4) == pytest.approx(coded + 2 * 3 / 4 * 4096)
    assert codec.kept_numbers(SQUARE) == kept
    assert traffic(None, [SQUARE, VECTOR], 4, 4).sent_bytes(4) == 2 * 3 / 4 * 4 * (2**20 + 1024)


GPT = profile(Shape("GPT", 24, 1024, 16, 16, 4096, 50304), 1024)
PLAIN = Candidate(mesh=Mesh(replicate=16), micro_batch=1, accumulation=1)


def step_s(candidate, per_node, bytes_per_s):
    fast = find("h100", 16)
    between = fast.between.model_copy(update={"bytes_per_s": bytes_per_s, "fits": ()})
    shape = {"devices_per_node": per_node, "nodes": 16 // per_node, "between": between}
    return price(GPT, candidate, fast.model_copy(update=shape)).step_s


@pytest.mark.parametrize("text", ["bf16", "int8", "topk:0.001", "powersgd:4"])
def test_a_codec_pays_where_links_are_slow_and_gains_nothing_where_they_hide_behind_compute(text):
    """Agarwal et al., "On the utility of gradient compression", MLSys 2022: with overlap, fast links need none."""
    coded = PLAIN._replace(codec=Codec.parse(text))
    assert step_s(coded, 1, 125e6) < 0.6 * step_s(PLAIN, 1, 125e6)
    hidden = step_s(coded._replace(micro_batch=64), 1, 50e9) / step_s(PLAIN._replace(micro_batch=64), 1, 50e9)
    assert 0.98 < hidden < 1.2


def test_an_all_to_all_is_not_summed_inside_nodes_first():
    """A ring passes a node's sum on once; an all-to-all sends every rank's own: of eight in a node it costs more."""
    coded = PLAIN._replace(codec=Codec.parse("bf16"))
    assert step_s(coded, 8, 125e6) > step_s(PLAIN, 8, 125e6)


def test_errors_need_room_twice_once_gradients_are_sent():
    """Those of the step before stay until it is known that this one is applied."""
    model, device = profile(Shape("GPT", 2, 1024, 16, 16, 4096, 50304), 16), find("h100").device
    plain = Candidate(mesh=Mesh(replicate=4), micro_batch=1, accumulation=1)
    coded = plain._replace(codec=Codec.parse("topk:0.01"))
    more = peak(model, coded, device).total_bytes - peak(model, plain, device).total_bytes
    carried = sum(w.numel for block in model.blocks for w in block.weights if coded.codec.carries(w.matrix))
    assert more == pytest.approx(2 * 4 * carried, rel=0.02)
