"""Names in a checkpoint are the plain model's, however it is wrapped; weights from outside may carry a prefix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.harness import run_ranks
from tests.run_tensors import all_tensors
from tests.small_jobs import classes_loss, job, mlp_rows, sgd, start, weights
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shoal.checkpoint.reader import Reader
from shoal.core.errors import CheckpointError, ModelError

pytestmark = pytest.mark.ranks


class Net(nn.Sequential):
    """Two blocks between two layers; compiles in a form that takes no compiler."""

    def __init__(self, wrap_block=lambda block: block):
        blocks = [wrap_block(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(2)]
        super().__init__(nn.Linear(8, 8), *blocks, nn.Linear(8, 4))

    def compile(self):
        super().compile(backend="eager")


def compiled(module):
    return torch.compile(module, backend="eager")


KINDS = {
    "plain": (Net, False),
    "--compile": (Net, True),
    "compiled": (lambda: compiled(Net()), False),
    "compiled blocks": (lambda: Net(compiled), False),
    "checkpointed blocks": (lambda: Net(checkpoint_wrapper), False),
    "all": (lambda: compiled(Net(lambda block: compiled(checkpoint_wrapper(block)))), False),
}


def run_of(kind, out, **settings):
    model, flag = KINDS[kind]
    made = job(
        model=model, data=mlp_rows(16), loss=classes_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )  # fmt: skip
    return start(made, out, steps=1, global_batch=4, compile=flag, ema=0.9, **settings)


def test_names_do_not_tell_how_the_model_was_wrapped_and_each_loads_in_each(tmp_path):
    """Prefixes of wrappers leaked into the saved names, so that files depended on them.

    https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/37
    https://github.com/huggingface/pytorch-image-models/pull/2003
    """

    def body(rank):
        held = {}
        for kind in KINDS:
            run = run_of(kind, tmp_path / kind)
            for window in run.windows():
                run.step(window)
            run.save()
            run.close()
            held[kind] = {name: tensor.clone() for name, tensor in all_tensors(run).items()}
            reader = Reader(tmp_path / kind / "checkpoints" / "step-1")
            assert reader.names() == sorted(held["plain"]), kind
            assert reader.values["optimizer"]["groups"][0]["parameters"] == [
                name for name, _ in Net().named_parameters()
            ]
        for kind in KINDS:
            for other in KINDS:
                out = tmp_path / f"{kind} in {other}"
                shutil.copytree(tmp_path / kind, out)
                run = run_of(other, out, resume=True)
                run.close()
                found = all_tensors(run)
                assert run.step_count == 1 and found.keys() == held[kind].keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in held[kind].items()), (kind, other)

    run_ranks(body, 1, timeout_s=120)


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda: DistributedDataParallel(Net()), "the model is wrapped in DistributedDataParallel"),
        (
            lambda: nn.Sequential(Net(), DataParallel(nn.Linear(4, 4))),
            "the model's part '1' is wrapped in DataParallel",
        ),
    ],
)
def test_a_model_that_sums_its_own_gradients_is_refused(tmp_path, wrap, text):
    """https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/37"""

    def body(rank):
        with pytest.raises(ModelError, match=text + ", but the gradients are summed by Shoal.*give the plain module"):
            start(job(model=wrap, data=mlp_rows(8), loss=classes_loss), tmp_path, steps=1, global_batch=4)

    run_ranks(body, 1)


def begin_from(file: Path, model: type[nn.Module] = Net):
    """The weights that a run begins from, and what it told."""
    told = []
    made = job(model=model, data=mlp_rows(8), loss=classes_loss, optimizer=sgd(0.0))
    run = start(made, file.with_suffix(".run"), told.append, steps=1, global_batch=4, init_from=str(file))
    run.close()
    return weights(run.model), [text for text in told if "--init-from" in text]


PREFIXED = {
    "ddp": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled ddp": lambda name: f"_orig_mod.module.{name}",
    "ddp of a compiled model": lambda name: f"module._orig_mod.{name}",
    "compiled block": lambda name: name.replace("1.0.", "1._orig_mod.0."),
}


def test_weights_from_a_file_may_carry_a_wrappers_prefix_and_that_is_said(tmp_path):
    """https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/37
    https://github.com/huggingface/pytorch-image-models/pull/2003
    """

    class Own(nn.Module):
        """A part of it is called as a wrapper calls what it wraps."""

        def __init__(self):
            super().__init__()
            self.module = Net()

        def forward(self, x):
            return self.module(x)

    def body(rank):
        torch.manual_seed(5)
        wanted = {name: torch.randn_like(tensor) for name, tensor in Net().state_dict().items()}
        for kind, prefix in PREFIXED.items():
            file = tmp_path / f"{kind}.safetensors"
            save_file({prefix(name): tensor for name, tensor in wanted.items()}, file)
            found, told = begin_from(file)
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), kind
            assert len(told) == 1 and "prefixes of a wrapper are left out of its names, as in " in told[0], kind
        file = tmp_path / "own.safetensors"
        save_file({f"module.{name}": tensor for name, tensor in wanted.items()}, file)
        found, told = begin_from(file, Own)
        assert all(torch.equal(found[f"module.{name}"], tensor) for name, tensor in wanted.items())
        assert told == []

    run_ranks(body, 1)


def test_weights_of_another_model_are_refused_by_name(tmp_path):
    def body(rank):
        plain = Net().state_dict()
        faults = {
            "both": ({**plain, "_orig_mod.0.bias": torch.zeros(8)}, "holds .*0.bias and .*0.bias, which are one name"),
            "more": ({**plain, "9.bias": torch.zeros(8)}, "of another model: it has 9.bias, which the model has not"),
            "less": ({k: v for k, v in plain.items() if k != "3.bias"}, "another model: 3.bias is missing; it has 0"),
            "shape": ({**plain, "3.bias": torch.zeros(5)}, r"3.bias has shape \(5,\), the model's is \(4,\); use the"),
        }
        for kind, (tensors, text) in faults.items():
            save_file(tensors, tmp_path / f"{kind}.safetensors")
            with pytest.raises(CheckpointError, match=text):
                begin_from(tmp_path / f"{kind}.safetensors")
        (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 64)
        with pytest.raises(CheckpointError, match="torn.safetensors cannot be read as safetensors"):
            begin_from(tmp_path / "torn.safetensors")
        with pytest.raises(CheckpointError, match="none.safetensors: no such file"):
            begin_from(tmp_path / "none.safetensors")

    run_ranks(body, 1)
