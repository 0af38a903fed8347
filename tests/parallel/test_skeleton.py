"""Running part of a model's own forward: every cut gives the whole model's losses and gradients, bit for bit."""

import copy
from dataclasses import dataclass

import pytest
import torch
from tests.small_jobs import LM
from torch import Tensor, nn
from torch.nn import functional

from shoal.blueprint.structures import tensors
from shoal.core.errors import ConfigError, ModelError
from shoal.models.gpt import GPT
from shoal.parallel.pipeline.chunks import holders, stages_of
from shoal.parallel.pipeline.skeleton import Skeleton
from shoal.parallel.pipeline.units import unit_paths

pytestmark = pytest.mark.unit


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str


class Skips(nn.Module):
    """A U-Net's shape: an early value read late, one overwritten in place, a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.arange(6.0))

    def forward(self, x: Tensor) -> Answer:
        base = self.down(x)
        early = functional.relu(base)
        late = self.middle(early)
        base.mul_(0.5)  # a statement: whoever holds the value sees the change
        late += early * 2
        late = self.norm(late)
        late[:, 0] = early[:, 1] * self.scale[0]
        rest = self.up(torch.cat([late[:, :3], early[:, 3:]], 1)) * self.scale + self.shift + base
        return Answer(rest, (early, late), "fine")


class Rotary(nn.Module):
    """A table that depends on no parameter, read by every block; keyword inputs; a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.table = Table()
        self.blocks = nn.ModuleList([Turned() for _ in range(4)])

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor | None]:
        x, table = self.tokens(ids), self.table(ids)
        keep = None if mask is None else mask[:, :, None].to(x.dtype)
        for block in self.blocks:
            x = block(x, table=table, keep=keep)
        return {"logits": x @ self.tokens.weight.T * scale, "nothing": None}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.rate
        return angle.cos(), angle.sin()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], keep: Tensor | None) -> Tensor:
        turned = x * table[0] + self.inner(x) * table[1]
        return x + (turned if keep is None else turned * keep)


def ids(batch: int = 2, length: int = 5) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 11


MODELS = {
    "skips": (Skips, (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double(),), {}),
    "rotary": (Rotary, (ids(),), {"mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]), "scale": 0.5}),
    "tied": (lambda: LM(tied=True), (ids(),), {}),
    "gpt": (lambda: GPT(vocabulary=11, width=8, layers=3, heads=2, context=8, tied=True), (ids(),), {}),
    "encoder and decoder": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True),
        (torch.ones(2, 3, 8).double(), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).double()),
        {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4).double()},
    ),
}


def loss_of(output) -> Tensor:
    return sum(t.double().square().sum() for t in tensors(output))


def in_stages(model: nn.Module, args, kwargs, cuts) -> Tensor:
    """Forward and backward stage after stage, each with nothing but what crosses; returns the loss."""
    skeleton = Skeleton(model, torch.device("cpu"))
    stages = stages_of(skeleton.record(args, kwargs), tuple(cuts))
    taken, left, received = [], [], {}
    for stage, span in enumerate(stages.spans):
        leaves = {n: t.detach().requires_grad_(t.requires_grad) for n, t in received.items()}
        known = {n: t.clone() if n in stages.recording.overwritten else t for n, t in leaves.items()}
        known, result = skeleton.run(stages.recording, span, known, args, kwargs)
        taken.append(leaves)
        last = stage + 1 == len(stages.spans)
        received = {} if last else {n: known[n] for n in stages.leaving(stage)}
        left.append(received)
    loss = loss_of(result)
    loss.backward()
    for stage in reversed(range(len(stages.spans) - 1)):
        pairs = [(t, taken[stage + 1][n].grad) for n, t in left[stage].items() if t.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [torch.zeros_like(t) if g is None else g for t, g in pairs])
    return loss


def places_to_cut(model: nn.Module, args, kwargs) -> list[str]:
    events = Skeleton(copy.deepcopy(model), torch.device("cpu")).record(args, kwargs).events
    return list(dict.fromkeys(e.what.removeprefix("unit ") for e in events if e.what.startswith("unit ")))[1:]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_stages_computes_what_it_computes_whole(name):
    """Skip connections and several outputs were dropped, or their gradients lost.

    https://github.com/deepspeedai/DeepSpeed/issues/969 https://github.com/deepspeedai/DeepSpeed/issues/2435
    https://github.com/pytorch/pytorch/issues/65038
    """
    make, args, kwargs = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    whole = copy.deepcopy(model)
    expected = loss_of(whole(*args, **kwargs))
    expected.backward()
    places = places_to_cut(model, args, kwargs)
    for cuts in [[place] for place in places] + [places]:
        parted = copy.deepcopy(model)
        assert torch.equal(in_stages(parted, args, kwargs, cuts), expected)
        for (name, a), (_, b) in zip(whole.named_parameters(), parted.named_parameters(), strict=True):
            assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), (cuts, name)
        for (name, a), (_, b) in zip(whole.named_buffers(), parted.named_buffers(), strict=True):
            assert torch.equal(a, b), (cuts, name)


def test_what_depends_on_no_parameter_does_not_cross():
    """Tables that every block reads: torch's own front end refuses values that skip over stages in training."""
    model = Rotary()
    recording = Skeleton(model, torch.device("cpu")).record((ids(),), {})
    stages = stages_of(recording, ("blocks.1", "blocks.3"))
    assert [[tuple(recording.values[n].shape) for n in into] for into in stages.crossing] == [
        [],
        [(2, 5, 8)],
        [(2, 5, 8)],
    ]


def test_a_value_that_is_read_two_stages_on_passes_through_the_one_between():
    stages = stages_of(Skeleton(Skips(), torch.device("cpu")).record((torch.ones(4, 6),), {}), ("middle", "up"))
    assert [len(into) for into in stages.crossing] == [0, 2, 4]


def test_each_stage_holds_what_it_reads_and_tied_weights_twice():
    model = GPT(vocabulary=11, width=8, layers=2, heads=2, context=8, tied=True)
    stages = stages_of(Skeleton(model, torch.device("cpu")).record((ids(),), {}), ("blocks.1",))
    held = holders(stages, [name for name, _ in model.named_parameters()])
    assert held["tokens.weight"] == (0, 1)
    assert held["positions.weight"] == (0,)
    assert held["blocks.1.norm_attention.weight"] == (1,)


def test_units_are_repeated_blocks_and_what_stands_beside_them():
    assert unit_paths(Rotary()) == ["tokens", "table", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert unit_paths(Skips()) == ["down", "middle", "norm", "up"]
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in "ab"]))
    assert unit_paths(nested) == ["0", "1.0", "1.1"]


class Shaped(nn.Module):
    def __init__(self, middle) -> None:
        super().__init__()
        self.first, self.second, self.middle = nn.Linear(3, 3), nn.Linear(3, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x), x))


def by_value(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden if hidden.sum() > 0 else -hidden


def by_view(hidden: Tensor, x: Tensor) -> Tensor:
    part = hidden[:, 0]
    hidden += 1
    return hidden * part[:, None]


def into_data(hidden: Tensor, x: Tensor) -> Tensor:
    copied = x.clone()
    copied[:, 0] = hidden[:, 0]
    return copied


def added_to_data(hidden: Tensor, x: Tensor) -> Tensor:
    """As a running mean in a buffer of the model's own is."""
    return hidden + x.clone().mul_(0.9).add_(hidden.detach())


@pytest.mark.parametrize(
    ("middle", "text"),
    [
        (added_to_data, r"add_ writes a value that depends on weights into one that does not"),
        (by_value, r"torch.Tensor.__bool__ cannot run without its data, .* use a layout without a pipeline"),
        (by_view, r"overwrites a tensor between blocks that another, read later, is a view of"),
        (into_data, r"writes a value that depends on weights into one that does not"),
    ],
)
def test_what_cannot_be_cut_right_is_refused_by_name(middle, text):
    with pytest.raises(ModelError, match=text):
        Skeleton(Shaped(middle), torch.device("cpu")).record((torch.ones(2, 3),), {})


def test_another_path_for_the_same_shapes_is_refused():
    def by_data(hidden: Tensor, x: Tensor) -> Tensor:
        return hidden.relu() if x.sum() > 0 else hidden.tanh()

    model = Shaped(by_data)
    skeleton = Skeleton(model, torch.device("cpu"))
    recording = skeleton.record((torch.ones(2, 3),), {})
    with pytest.raises(ModelError, match=r"came to torch.Tensor.tanh where it came to torch.Tensor.relu when"):
        skeleton.run(recording, range(len(recording.events)), {}, (-torch.ones(2, 3),), {})


class Carrying(Shaped):
    """Keeps a value from one forward to the next; ``reads``: and adds it."""

    def __init__(self, reads: bool, buffer: bool = False) -> None:
        super().__init__(lambda hidden, x: hidden.relu())
        self.reads = reads
        if buffer:
            self.register_buffer("state", torch.zeros(3))
        else:
            self.state = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x), x)
        hidden = hidden + self.state if self.reads else hidden
        self.state = hidden.detach().mean(0)
        return self.second(hidden)


@pytest.mark.parametrize("buffer", [False, True])
def test_a_value_of_the_models_that_the_next_forward_reads_is_refused_by_name(buffer):
    """A stage that had left the forward before went on with the first one."""
    with pytest.raises(ModelError, match="the model keeps 'state', which depends on weights, from one forward to the"):
        Skeleton(Carrying(True, buffer), torch.device("cpu")).record((torch.ones(2, 3),), {})
    assert Skeleton(Carrying(False, buffer), torch.device("cpu")).record((torch.ones(2, 3),), {}).events


def test_cuts_that_name_nothing_or_go_backwards_are_refused():
    recording = Skeleton(Skips(), torch.device("cpu")).record((torch.ones(4, 6),), {})
    with pytest.raises(ConfigError, match="cut before 'left': the forward calls no such unit; it calls down, middle"):
        stages_of(recording, ("left",))
    with pytest.raises(ConfigError, match="cut before 'middle' comes before the cut of an earlier stage"):
        stages_of(recording, ("up", "middle"))
