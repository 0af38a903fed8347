"""A traced model is priced as one of the same shape is: products, attention, head and loss, on either device."""

import pytest
import torch
from torch.nn import functional as F

from shoal.blueprint.trace import Ending, trace
from shoal.cluster.facts import Attention
from shoal.cluster.presets import preset
from shoal.models.gpt import GPT
from shoal.models.vit import ViT
from shoal.plan.candidate import Candidate
from shoal.plan.from_blueprint import profile
from shoal.plan.mesh import Mesh
from shoal.plan.rates import op_seconds
from shoal.plan.shapes import Shape, Software
from shoal.plan.time import Prices
from shoal.plan.transformer import profile as shaped

pytestmark = pytest.mark.unit
WIDTH, HEADS, LAYERS, V, T = 2048, 16, 2, 50304, 2048
SHAPE = Shape("GPT", LAYERS, WIDTH, HEADS, HEADS, 4 * WIDTH, V, gated=False, learned=T)
#: torch's own loss under autocast: 14 bytes of a logit forward, 22 back.
EAGER = Software(loss_bytes=36)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def traced(half):
    with torch.device("meta"):
        model = GPT(V, WIDTH, LAYERS, HEADS, T)
    ids = torch.zeros(2, T, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return trace(model, (ids,), {}, 2, Ending(loss, ids))


@pytest.fixture(scope="module")
def blueprint():
    return traced(half=True)


def units(count=LAYERS):
    return [f"blocks.{n}" for n in range(count)]


def seconds(made, device, kind, names=()):
    """(Forward, backward) of one sample in all operations of a kind, or of some names."""
    found = [
        op_seconds(op, 1, device, op.precision or made.precision)
        for block in made.blocks
        for op in block.ops
        if op.kind == kind and (not names or op.name in names)
    ]
    return tuple(map(sum, zip(*found, strict=True)))


@pytest.mark.parametrize("name", ["h100", "a100-80gb"])
def test_a_traced_model_takes_as_long_as_one_of_its_shape(blueprint, name):
    device = preset(name).device
    made = profile(blueprint, units(), precision="bf16", kernels=device.kernels)
    other = shaped(SHAPE, T, software=EAGER)
    assert made.model_flops == other.model_flops
    for kind in ("matmul", "attention"):
        assert seconds(made, device, kind) == pytest.approx(seconds(other, device, kind), rel=0.01)
    mine = sum(seconds(made, device, "memory", ("cross_entropy",)))
    assert mine == pytest.approx(sum(seconds(other, device, "memory", ("loss",))), rel=0.01)


def test_in_float32_so_do_its_embedding_and_its_loss():
    """A lookup reads rows, its backward writes the gradient of the whole table; 8 bytes of a logit and 16 back."""
    device = preset("h100").device
    made = profile(traced(half=False), units(), kernels=device.kernels)
    other = shaped(SHAPE, T, precision="fp32", software=Software(loss_bytes=24))
    for kind, name, same in (("matmul", (), ()), ("memory", ("embedding",), ("embedding",))):
        assert seconds(made, device, kind, name) == pytest.approx(seconds(other, device, kind, same), rel=0.01)
    mine, theirs = (sum(seconds(m, device, "memory", (n,))) for m, n in ((made, "cross_entropy"), (other, "loss")))
    assert mine == pytest.approx(theirs, rel=0.01)


def test_what_a_causal_mask_hides_costs_nothing_where_kernels_skip_it(blueprint):
    device = preset("h100").device
    made = profile(blueprint, units(), precision="bf16", kernels="cuda-flash")
    (forward, back), ops = seconds(made, device, "attention"), [o for b in made.blocks for o in b.ops]
    attention = next(op for op in ops if op.kind == "attention")
    assert attention.causal and attention.flops == 4 * T * T * WIDTH  # counted in full
    rate = device.flops_per_s["bf16"] * device.attention_share
    assert forward == pytest.approx(LAYERS * attention.flops / 2 / rate)
    assert back == pytest.approx(2.5 * forward)
    whole = op_seconds(attention._replace(causal=False), 1, device, "bf16")
    assert whole == pytest.approx((2 * forward / LAYERS, 2 * back / LAYERS))
    eager = device.model_copy(update={"kernels": "cuda-math"})
    scores = next(
        op for b in profile(blueprint, units(), precision="bf16", kernels="cuda-math").blocks for op in b.ops
        if op.kind == "attention"
    )  # fmt: skip
    assert scores.backward == 2 and scores.moved_bytes > 10 * attention.moved_bytes
    assert op_seconds(scores._replace(moved_bytes=0, back_moved_bytes=0), 1, eager, "bf16")[0] == whole[0]


def test_attention_is_causal_only_where_the_call_says_so():
    ids = torch.zeros(2, 16, 16)
    image = trace(ViT(size=16), (ids,), {}, 2)
    made = profile(image, units(4))
    assert not any(op.causal for block in made.blocks for op in block.ops)

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            q = self.layer(x)[:, None]
            mask = torch.ones(4, 4, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, q, q, mask) + F.scaled_dot_product_attention(
                q, q, q, None, 0.0, True
            )

    both = profile(trace(Masked(), (torch.zeros(2, 4, 8),), {}, 2), ["layer"])
    assert [op.causal for block in both.blocks for op in block.ops if op.kind == "attention"] == [False, True]


def test_measured_attention_is_chosen_by_whether_it_looks_back():
    def measured(seconds, **changes):
        return Attention(precision="bf16", m=64, k=64, n=64, seconds=seconds, **changes)

    device = preset("h100").device.model_copy(update={"attentions": (measured(1.0), measured(3.0, causal=False))})
    small = trace(GPT(61, 32, 1, 4, 16), (torch.zeros(2, 16, dtype=torch.long),), {}, 2)
    attention = next(op for b in profile(small, ["blocks.0"]).blocks for op in b.ops if op.kind == "attention")
    assert attention.causal
    back, both = (op_seconds(attention._replace(causal=causal), 1, device, "bf16")[0] for causal in (True, False))
    assert both == pytest.approx(3 * back)
    before = device.model_copy(update={"attentions": (measured(1.0),)})  # by an earlier version: causal alone
    assert op_seconds(attention._replace(causal=False), 1, before, "bf16")[0] == pytest.approx(back)


def layer_ops(made, name):
    block = next(block for block in made.blocks if block.repeated)
    return [op for op in block.ops if op.name == name]


def bytes_of(op):
    return op.moved_bytes, op.fixed_bytes, op.back_moved_bytes, op.back_fixed_bytes


def test_a_rank_of_two_moves_its_share_of_each_layer(blueprint):
    """Of qkv, the first linear layer: all of x, half of the weight and of what it gives; of out the other way."""
    x, y, w, b = 2 * T * WIDTH, 2 * T * 3 * WIDTH, 2 * 3 * WIDTH * WIDTH, 2 * 3 * WIDTH
    for degree in (1, 2):
        made = profile(blueprint, units(), tensor=degree, precision="bf16", kernels="cuda-flash")
        part, weight = y / degree, w / degree
        product, side, out, *_ = layer_ops(made, "linear")
        assert bytes_of(product) == (x + part, weight + b / degree, 2 * (part + x), 2 * weight)
        cast = 3 * weight + 3 * b / degree
        assert bytes_of(side) == (3 * x, cast, part + 3 * x, cast + b / degree)
        assert out.moved_bytes == x / degree + x and out.fixed_bytes == pytest.approx(w / 3 / degree + b / 3)
        assert out.back_moved_bytes == 2 * x + 2 * x / degree  # its gradient is whole and read twice
        (gelu,) = layer_ops(made, "gelu")
        assert bytes_of(gelu) == (2 * 4 * x / degree, 0, 3 * 4 * x / degree, 0)
        attention = next(op for op in layer_ops(made, "scaled_dot_product_attention") if op.kind == "attention")
        assert bytes_of(attention) == (4 * x / degree, 0, 8 * x / degree, 0)
        assert attention.flops == 4 * T * T * WIDTH / degree


def test_recomputing_adds_a_forward_with_its_kernels(blueprint):
    cluster = preset("h100", 1)
    made = profile(blueprint, units(), precision="bf16", kernels="cuda-flash")
    block = next(block for block in made.blocks if block.repeated)
    assert sum(op.back_launches for op in block.ops) > sum(op.launches for op in block.ops) > 0
    slow = cluster.model_copy(update={"device": cluster.device.model_copy(update={"launch_s": 1.0})})

    def work(recompute, of):
        asked = Candidate(Mesh(), 1, 1, recompute=recompute)
        return Prices(made.model_copy(update={"blocks": (block,)}), of).stages(asked)[0]

    none, full = work("none", cluster), work("full", cluster)
    assert full.forward == none.forward
    assert full.backward.compute == pytest.approx(none.backward.compute + none.forward.compute)
    none, full = work("none", slow), work("full", slow)
    launched = [sum(op.launches for op in block.ops), sum(op.back_launches for op in block.ops)]
    assert (none.forward.total, none.backward.total) == pytest.approx(tuple(launched))
    assert full.backward.total == pytest.approx(sum(launched))
