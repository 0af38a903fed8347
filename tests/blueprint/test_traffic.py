"""Bytes that an operation's kernels read and write, forward and backward, against counts by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.blueprint.facts import Touch
from shoal.blueprint.kernels import on
from shoal.blueprint.stored import Sketch
from shoal.blueprint.trace import Ending, trace

pytestmark = pytest.mark.unit
B, T, D, H, V = 2, 8, 32, 48, 1000
N = B * T


class Net(nn.Module):
    """An embedding, a norm, a layer with a bias, a residual sum, a head."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, H)
        self.down, self.head = nn.Linear(H, D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def ids():
    return torch.zeros(B, T, dtype=torch.long)


def traced(model, half=False, args=None, ending=loss):
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return trace(model, args or (ids(),), {}, B, Ending(ending, ids()) if ending else None)


def named(blueprint, name, nth=0):
    every = [*blueprint.operations, *blueprint.loss]
    return [operation for operation in every if operation.name == name and operation.launches][nth]


def moved(operation):
    """(Forward, backward) beside products, (forward, backward) of products."""
    return tuple(sum(touch[place] for touch in operation.touches) for place in range(1, 5))


def launches(operation):
    return operation.launches, operation.back_launches


def test_an_embedding_reads_the_rows_that_it_looks_up_and_writes_a_dense_gradient():
    table = named(traced(Net()), "embedding")
    rows = N * D * 4
    # the residual reads the rows twice, so that two gradients are summed: two reads, one written
    assert moved(table) == (8 * N + 2 * rows, 8 * N + rows + V * D * 4 + 3 * rows, 0, 0)
    assert launches(table) == (1, 2)
    by = {touch.of: touch for touch in table.touches}
    assert by["table.weight"].forward == 0 and by["table.weight"].backward == V * D * 4


def test_a_layer_norm_reads_its_rows_and_writes_them_and_statistics():
    norm = named(traced(Net()), "layer_norm")
    rows, weights, statistics = N * D * 4, 2 * D * 4, 2 * N * 4
    assert moved(norm) == (2 * rows + weights + statistics, 3 * rows + 2 * weights + statistics, 0, 0)
    assert launches(norm) == (1, 1)


def test_a_residual_sum_has_a_backward_only_where_gradients_meet():
    add = named(traced(Net()), "add")
    assert moved(add) == (3 * N * D * 4, 0, 0, 0) and launches(add) == (1, 0)

    class Twice(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids) + 1.0
            return self.head(x) + self.head(x)

    met = named(traced(Twice()), "add")
    assert moved(met) == (2 * N * D * 4, 3 * N * D * 4, 0, 0) and launches(met) == (1, 1)


def test_a_layer_under_autocast_casts_beside_its_products():
    up = named(traced(Net(), half=True), "linear")
    x, w, b, y = N * D, D * H, H, N * H
    casts = 6 * (x + w + b)  # 4 read, 2 written
    back = 6 * (x + w + b) + 2 * y + 2 * b  # the gradients of all three to float32; a bias's is a sum of rows
    products = 2 * (x + w + b + y)
    back_products = 2 * ((y + w + x) + (y + x + w))
    assert moved(up) == (casts, back, products, back_products)
    assert launches(up) == (4, 6)
    weight = next(touch for touch in up.touches if touch.of == "up.weight")
    assert weight == Touch("up.weight", 6 * w, 6 * w, 2 * w, 2 * 2 * w)


def test_a_layer_in_float32_has_its_products_and_the_sum_of_its_bias():
    up = named(traced(Net()), "linear")
    x, w, b, y = N * D, D * H, H, N * H
    assert moved(up) == (0, 4 * (y + b), 4 * (x + w + b + y), 4 * ((y + w + x) + (y + x + w)))
    assert launches(up) == (1, 3)


def test_a_loss_moves_a_float32_copy_and_log_probabilities():
    """Under autocast of each logit: 2 + 4 to copy, 4 + 4 to normalise; 4 of its gradient by rows, 4 + 4 + 4 through the
    logarithm, 4 + 2 back. A row has its class, its loss is one number with one weight."""
    found = named(traced(Net(), half=True), "cross_entropy")
    logits, rows = N * V, 8 * N
    assert moved(found) == (14 * logits + rows + 8, 22 * logits + rows + 8, 0, 0)
    assert launches(found) == (3, 3)
    whole = named(traced(Net()), "cross_entropy")
    assert moved(whole) == (8 * logits + rows + 8, 16 * logits + rows + 8, 0, 0)


class Views(nn.Module):
    """A packed layer that is taken apart."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(D, 2 * H), nn.Linear(H, V)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)
        return self.head(first * second)


def test_views_start_no_kernel_and_their_gradients_are_put_together():
    blueprint = traced(Views(), args=(torch.zeros(B, T, D),))
    (chunk,) = (operation for operation in blueprint.operations if operation.name == "chunk")
    assert launches(chunk) == (0, 1) and moved(chunk) == (0, 2 * N * 2 * H * 4, 0, 0)
    assert moved(named(blueprint, "mul")) == (3 * N * H * 4, 6 * N * H * 4, 0, 0)


def test_what_is_overwritten_is_not_read_and_what_is_expanded_is_read_once():
    class Odd(nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            made = torch.empty_like(x)
            made.copy_(bias.expand_as(x))
            made += x
            made[:, 0].zero_()
            return made[torch.tensor([1])] + torch.zeros_like(x)

    blueprint = traced(Odd(), args=(torch.zeros(B, T), torch.zeros(T)), ending=None)
    found = {(o.name, o.in_place): (moved(o)[0], o.launches) for o in blueprint.operations}
    assert found["empty_like", False] == (0, 0)
    assert found["copy", True] == (4 * (T + B * T), 1)
    assert found["add", True] == (4 * 3 * B * T, 1)
    assert found["zero", True] == (4 * B, 1)
    assert found["zeros_like", False] == (4 * B * T, 1)
    assert found["getitem", False] == (4 * 2 * T + 8, 1)  # the row that is looked up


class Heads(nn.Module):
    """Attention that looks back, a fused norm, dropout."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm, self.drop = nn.Linear(D, 3 * D), nn.RMSNorm(D), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q.float(), k, v.float(), mask, is_causal=mask is None)
        return self.drop(self.norm(y.transpose(1, 2).flatten(2)))


def heads(half=False, **changes):
    args = (torch.zeros(B, T, D), *changes.values())
    return traced(Heads(), half=half, args=args, ending=lambda output, target: output.sum())


def test_fused_attention_moves_its_tensors_and_back_their_gradients_too():
    attention = named(on("cuda-flash", heads()), "scaled_dot_product_attention")
    each = N * D * 4
    assert moved(attention) == (0, 0, 4 * each, 3 * 2 * each + 2 * each) and launches(attention) == (1, 3)
    half = named(on("cuda-flash", heads(half=True)), "scaled_dot_product_attention")
    assert moved(half) == (2 * 6 * N * D, 2 * 6 * N * D, 4 * each / 2, 4 * each) and launches(half) == (3, 5)
    masked = named(on("cuda-flash", heads(mask=torch.zeros(T, T))), "scaled_dot_product_attention")
    assert moved(masked)[2:] == (4 * each + 4 * T * T, 8 * each + 4 * T * T)


def test_attention_that_is_not_fused_moves_its_scores():
    attention = named(on("cuda-math", heads()), "scaled_dot_product_attention")
    each, scores = N * D * 4, B * 4 * T * T * 4
    assert moved(attention) == (0, 0, 4 * each + 5 * scores, 8 * each + 7 * scores)


def test_a_fused_norm_and_dropout_of_another_device_are_one_kernel_each():
    blueprint = on("cuda-flash", heads())
    rows, weight = N * D * 4, D * 4
    norm, drop = named(blueprint, "rms_norm"), named(blueprint, "dropout")
    assert moved(norm) == (2 * rows + weight, 3 * rows + 2 * weight, 0, 0) and launches(norm) == (1, 2)
    assert moved(drop) == (2 * rows + N * D, 2 * rows + N * D, 0, 0) and launches(drop) == (1, 1)
    assert launches(named(heads(), "rms_norm"))[0] > 1  # here its parts, one by one


def test_without_a_loss_there_is_no_backward_to_count():
    blueprint = traced(Net(), ending=None)
    assert all(touch.backward == touch.product_backward == 0 for o in blueprint.operations for touch in o.touches)
    assert moved(named(on("cuda-flash", blueprint), "layer_norm"))[0] > 0
    assert all(operation.back_launches == 0 for operation in on("cuda-flash", blueprint).operations)


def test_a_file_keeps_what_kernels_move(tmp_path):
    sketch = Sketch(name="net", blueprint=traced(Net(), half=True), units=())
    sketch.write(tmp_path / "net.json")
    assert Sketch.read(tmp_path / "net.json") == sketch
    assert isinstance(named(Sketch.read(tmp_path / "net.json").blueprint, "linear").touches[0], Touch)
