"""The blueprint of a model: operations as its code asks for them, exact counts, and what cannot be traced."""

import contextlib

import pytest
import torch
from tests.small_jobs import LM
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoal.blueprint.facts import Ref
from shoal.blueprint.structures import with_tensors
from shoal.blueprint.trace import trace
from shoal.core.errors import ModelError
from shoal.models.gpt import GPT

pytestmark = pytest.mark.unit

GPT_SIZES = {"vocabulary": 61, "width": 32, "layers": 3, "heads": 4, "context": 16}


def gpt_blueprint(samples=2, length=16, **changes):
    model = GPT(**{**GPT_SIZES, **changes})
    return model, trace(model, (torch.zeros(samples, length, dtype=torch.long),), {}, samples)


@pytest.mark.parametrize(("samples", "length"), [(2, 16), (1, 9)])
def test_flops_are_the_stated_formula_to_the_unit(samples, length):
    """Utilisation used inconsistent counts: the embedding in or out, attention ignored.

    A forward and backward of a token is 6 x (weights that multiply it) + 12 x layers x width x sequence.
    https://github.com/pytorch/torchtitan/issues/452 https://github.com/pytorch/torchtitan/issues/1989
    """
    model, blueprint = gpt_blueprint(samples, length)
    multiplied = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "tokens" not in name)
    multiplied -= model.positions.weight.numel()
    wanted = 6 * multiplied + 12 * GPT_SIZES["layers"] * GPT_SIZES["width"] * length
    assert 3 * blueprint.flops() == wanted * samples * length
    assert blueprint.flops() == sum(blueprint.flops(path) for path in ("blocks", "head"))


def test_bytes_kept_for_backward_are_what_autograd_keeps():
    model, blueprint = gpt_blueprint()
    kept = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.zeros(2, 16, dtype=torch.long))
    assert output.requires_grad
    assert blueprint.kept_bytes() == sum(size for size, _ in kept.values())


def test_parameters_are_listed_once_with_their_other_names():
    _, blueprint = gpt_blueprint(tied=True)
    table = blueprint.parameter["tokens.weight"]
    assert table.ties == ("head.weight",)
    assert blueprint.parameter["head.weight"] is table
    assert [p.name for p in blueprint.parameters].count("head.weight") == 0
    assert table.bytes == 61 * 32 * 4


def test_attention_and_norms_are_single_operations_in_their_modules():
    _, blueprint = gpt_blueprint()
    names = [operation.name for operation in blueprint.within("blocks.1")]
    assert names.count("scaled_dot_product_attention") == 1
    assert names.count("layer_norm") == 2
    assert {operation.module for operation in blueprint.within("blocks.1.attention")} >= {"blocks.1.attention.qkv"}


def test_the_flow_of_data_goes_from_inputs_to_outputs():
    model = LM()
    blueprint = trace(model, (torch.zeros(2, 5, dtype=torch.long),), {}, 2)
    reached = set(blueprint.inputs)
    for operation in blueprint.operations:
        if operation.parameters or reached & set(operation.reads):
            reached |= set(operation.gives)
    assert set(blueprint.outputs) <= reached
    assert all(blueprint.values[number].of_model for number in blueprint.outputs)
    assert not any(blueprint.values[number].of_model for number in blueprint.inputs)


class Odd(nn.Module):
    """Keyword inputs, an operation in place, an index, a dict as the result."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float, mask: Tensor | None = None) -> dict[str, Tensor]:
        y = self.layer(x)
        y += 1
        return {"y": functional.softmax(y[:, 1:] * scale, dim=-1)}


def test_arguments_are_kept_as_plain_values():
    blueprint = trace(Odd(), (torch.zeros(2, 4),), {"scale": 0.5}, 2)
    by_name = {operation.name: operation for operation in blueprint.operations}
    assert by_name["add"].in_place
    assert by_name["linear"].arguments[1:] == (Ref("layer.weight"), Ref("layer.bias"))
    assert by_name["mul"].arguments[1] == 0.5
    assert dict(by_name["softmax"].keywords)["dim"] == -1
    assert [blueprint.values[number].shape for number in blueprint.outputs] == [(2, 3)]


def test_tracing_computes_nothing_and_changes_nothing():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    trace(model, (torch.ones(3, 4),), {}, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert trace(nn.Linear(4, 2, device="meta"), (torch.ones(3, 4),), {}, 3).flops() == 2 * 3 * 4 * 2


class Remembering(nn.Module):
    """Counts its forwards, keeps a state, a list of what it saw, and a table that it makes when it is first called."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.state, self.seen = nn.Linear(4, 4), 0, None, ["none"]

    def forward(self, x):
        if not hasattr(self, "table"):
            self.table = torch.ones(4)
        x = self.linear(x) * self.table + (0 if self.state is None else self.state)
        self.calls += 1
        self.state = x.detach().mean(0)
        self.seen.append(self.state)
        return x


def test_tracing_leaves_what_modules_keep_between_forwards_as_it_was():
    """A counter was one ahead under layouts that are traced, and a kept state was a tensor without data."""
    model = nn.Sequential(Remembering(), nn.Linear(4, 4))
    trace(model, (torch.ones(3, 4),), {}, 3)
    assert (model[0].calls, model[0].state, model[0].seen) == (0, None, ["none"]) and not hasattr(model[0], "table")
    first = model(torch.ones(3, 4))
    state, seen = model[0].state, model[0].seen
    trace(model, (torch.ones(3, 4),), {}, 3)
    assert model[0].calls == 1 and model[0].state is state and model[0].seen is seen and len(seen) == 2
    assert not torch.equal(model(torch.ones(3, 4)), first), "it adds its state"


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_that_stands_at_two_paths_gets_its_own_tensors_back(fails):
    """They stayed fake ones: the model could not be run any more."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.ModuleDict({"first": block, "again": nn.ModuleList([block])})
    before = [*model.parameters(), *model.buffers()]
    held = {name: torch.zeros_like(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    with contextlib.suppress(KeyError), with_tensors(model, held):
        assert model["again"][0][0].weight is held["first.0.weight"]
        assert block[1].running_var is held["first.1.running_var"]
        block[1].num_batches_tracked = torch.ones(())
        if fails:
            raise KeyError
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], before, strict=True))
    trace(nn.Sequential(block, nn.ReLU(), block), (torch.ones(3, 4),), {}, 3)
    assert block[0].weight is before[0]


class Listing(nn.Module):
    """Reads its parameters from lists of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8, 4))
        self.every = [(self.up, "relu"), (self.down, "tanh")]

    def forward(self, x):
        for weight, name in self.every:
            x = getattr(x @ weight, name)()
        return x


def test_parameters_that_a_module_lists_beside_are_replaced_there_too():
    model = Listing().to("meta")
    model.every = [(model.up, "relu"), (model.down, "tanh")]
    every = model.every
    assert [of.parameters for of in trace(model, (torch.ones(3, 4),), {}, 3).operations] == [("up",), (), ("down",), ()]
    assert model.every is every and every[0][0] is model.up


def test_a_model_that_needs_its_values_is_refused_with_the_module():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(ModelError, match="the model cannot be traced: module '1' .* keep values of tensors out"):
        trace(nn.Sequential(nn.Linear(2, 2), Decides()), (torch.ones(1, 2),), {})


def test_a_module_that_torch_has_no_rule_for_is_not_told_to_keep_values_out_of_its_control_flow():
    class Ruleless(nn.Module):
        def forward(self, x):
            raise RuntimeError("Expected inputs of BF16 type")

    said = "Expected inputs of BF16 type; where it runs on real data, choose another implementation of it, or replicate"
    with pytest.raises(
        ModelError, match=rf"the model cannot be traced: module '1' \(Ruleless\) .*{said} and shard alone"
    ):
        trace(nn.Sequential(nn.Linear(4, 4), Ruleless()), (torch.ones(2, 4),), {})


class Off(TorchFunctionMode):
    """Dropout gives back what it got."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is functional.dropout else func(*args, **(kwargs or {}))


def test_a_function_that_gives_back_what_it_got_overwrites_nothing():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(16, 8))
    with Off():
        blueprint = trace(model, (torch.zeros(2, 8),), {})
    assert [(operation.name, operation.in_place) for operation in blueprint.operations] == [
        ("linear", False), ("relu", True), ("linear", False)
    ]  # fmt: skip
