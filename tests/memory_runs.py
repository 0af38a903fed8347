"""What real runs hold: every storage that torch allocates on a rank, and the most of them at once within a step.

``python -m tests.memory_runs`` prints all cells beside what the plan says.
"""

from __future__ import annotations

import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.harness import run_ranks
from tests.small_jobs import Rows, job, start
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal import Loss
from shoal.blueprint.cut import cut
from shoal.blueprint.facts import Blueprint
from shoal.blueprint.trace import Ending, trace
from shoal.cluster.facts import Device
from shoal.engine.forward import split_inputs
from shoal.engine.precision import Precision
from shoal.models.gpt import GPT
from shoal.parallel.pipeline.units import unit_paths
from shoal.plan.candidate import Candidate, Memory, States
from shoal.plan.from_blueprint import profile
from shoal.plan.memory import ranks
from shoal.plan.mesh import Mesh

CPU = Device(
    name="two cores", kernels="cpu", memory_bytes=8 << 30, flops_per_s={"fp32": 1e11, "bf16": 1e11, "fp64": 5e10},
    matmul_share=0.8, attention_share=0.5, memory_bytes_per_s=1e10, memory_share=0.8, launch_s=5e-6,
)  # fmt: skip


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive; those that are freed by resizing count as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[Any, str]] = {}
        self.peak = 0
        self.at_peak: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # here is below the functions that parts of tensors answer
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    self._see(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, str(func))
        now = self.now()
        if now > self.peak:
            self.peak = now
            self.at_peak = [(storage.nbytes(), by) for ref, by in list(self.live.values()) if (storage := ref())]
        return result

    def _see(self, tensor: torch.Tensor, by: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a tensor without memory of its own
        key = storage._cdata
        if key not in self.live and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            node = torch._C._current_autograd_node()
            where = f"{by} {tuple(tensor.shape)}" + (f" in {node.name()}" if node else "")
            self.live[key] = weakref.ref(storage, lambda _: self.live.pop(key, None)), where

    def now(self) -> int:
        """Bytes alive. (Of a copy: a thread of gloo may let go of a storage meanwhile.)"""
        return sum(storage.nbytes() for ref, _ in list(self.live.values()) if (storage := ref()) is not None)


class Case(NamedTuple):
    """A model with data and a loss, as a job takes them."""

    model: Any
    rows: list[Any]
    loss: Any
    optimizer: Any = None


class Found(NamedTuple):
    """A rank's run: the most bytes at once within a step, and what it held between steps."""

    peak: int
    between: int
    at_peak: list[tuple[int, str]]


def measured(case: Case, out: Path, workers: int, steps: int = 3, **settings: Any) -> list[Found]:
    """Run the engine on ``workers`` ranks; of the steps after the first, the one with the lowest peak is told.

    A thread of gloo may let go of a collective's tensors late, which adds to one step and not to another.
    """

    def rank(number: int) -> Found:
        made = job(
            model=case.model, data=Rows(case.rows), loss=case.loss,
            optimizer=case.optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)),
        )  # fmt: skip
        live, found = Live(), []
        with live:
            run = start(made, out / f"{workers}", steps=steps, epochs=steps, **settings)
            for window in run.windows():
                between, live.peak = live.now(), 0
                run.step(window)
                found.append(Found(live.peak, between, sorted(live.at_peak, reverse=True)))
            run.close()
        return min(found[1:], key=lambda step: step.peak)

    case.model()  # imported once, here
    return run_ranks(rank, workers, timeout_s=120)


def blueprint_of(case: Case, samples: int, precision: Any = "fp32") -> tuple[Blueprint, list[str]]:
    """The traced model with its loss, and its units."""
    torch.manual_seed(0)
    policy = Precision(precision, "cpu")
    with policy.user_code():
        model = case.model().train()
    policy.widen(model)
    batch = torch.utils.data.default_collate(case.rows[:samples])
    inputs, targets = (policy.place(part, torch.device("cpu")) for part in batch)
    args, kwargs = split_inputs(inputs)
    with policy.forward():
        return trace(model, args, kwargs, samples, Ending(case.loss, targets)), unit_paths(model)


def predicted(case: Case, mesh: str, samples: int, traced: int | None = None, **settings: Any) -> list[Memory]:
    """The peak of each pipeline coordinate for micro-batches of ``samples``."""
    degrees = Mesh.parse(mesh)
    precision = settings.get("precision", "fp32")
    blueprint, units = blueprint_of(case, traced or samples, precision)
    made = profile(blueprint, units, tensor=degrees.tensor, precision=precision)
    stages = degrees.pipeline * settings.get("chunks", 1)
    paths = [block.path for block in made.blocks]
    starts = (0, *(paths.index(unit) for unit in cut(blueprint, units, stages))) if stages > 1 else (0,)
    wide = 2 if precision == "fp64" else 1
    states = settings.pop("states", States(4 * wide, 0, 4 * wide, 8 * wide))
    candidate = Candidate(degrees, samples, settings.pop("accumulation", 1), starts=starts, states=states, **settings)
    return ranks(made, candidate, CPU)


def language() -> GPT:
    """Four blocks, so that blocks weigh more than what lies around them."""
    return GPT(vocabulary=128, width=64, layers=4, heads=4, context=64)


def language_rows() -> list[Any]:
    """32 windows of 64 tokens, and as many targets."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(128, (2, 64), generator=generator)) for _ in range(32)]


def every_token(output: torch.Tensor, targets: torch.Tensor) -> Loss:
    """Cross-entropy, summed."""
    return Loss(F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


CASE = Case(language, language_rows(), every_token)
MICRO_BATCH = 4
#: (mesh, accumulation, other fields of a plan)
CELLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("replicate=1", 1, {}),
    "fp64": ("replicate=1", 1, {"precision": "fp64"}),
    "replicate": ("replicate=2", 1, {}),
    "replicate, 4": ("replicate=2", 4, {}),
    "replicate, 4, full": ("replicate=2", 4, {"recompute": "full"}),
    "replicate, selective": ("replicate=2", 1, {"recompute": "selective"}),
    "replicate, bf16": ("replicate=2", 1, {"precision": "bf16"}),
    "shard 3": ("shard=2", 1, {}),
    "shard 2": ("shard=2", 1, {"shard_level": 2}),
    "shard 1": ("shard=2", 1, {"shard_level": 1}),
    "shard 3, 4": ("shard=2", 4, {}),
    "shard 2, 4": ("shard=2", 4, {"shard_level": 2}),
    "shard 1, 4": ("shard=2", 4, {"shard_level": 1}),
    "shard 3, full": ("shard=2", 1, {"recompute": "full"}),
    "shard 3, bf16": ("shard=2", 1, {"precision": "bf16"}),
    "tensor": ("tensor=2", 1, {}),
    "tensor, 4": ("tensor=2", 4, {}),
    "tensor, full": ("tensor=2", 1, {"recompute": "full"}),
    "tensor, bf16": ("tensor=2", 1, {"precision": "bf16"}),
    "gpipe": ("pipeline=2", 4, {"schedule": "gpipe"}),
    "1f1b": ("pipeline=2", 4, {"schedule": "1f1b"}),
    "1f1b, full": ("pipeline=2", 4, {"schedule": "1f1b", "recompute": "full"}),
    "1f1b, bf16": ("pipeline=2", 4, {"schedule": "1f1b", "precision": "bf16"}),
    "interleaved-1f1b": ("pipeline=2", 4, {"schedule": "interleaved-1f1b", "chunks": 2}),
    "looped-bfs": ("pipeline=2", 4, {"schedule": "looped-bfs", "chunks": 2}),
    "zbv": ("pipeline=2", 4, {"schedule": "zbv", "chunks": 2}),
    "dualpipev": ("pipeline=2", 4, {"schedule": "dualpipev", "chunks": 2}),
    "interleaved-zero-bubble": ("pipeline=2", 4, {"schedule": "interleaved-zero-bubble"}),
    "hybrid shard": ("replicate=2,shard=2", 1, {}),
    "shard x tensor": ("shard=2,tensor=2", 1, {}),
    "pipeline x tensor": ("pipeline=2,tensor=2", 4, {"schedule": "1f1b"}),
    "pipeline x shard": ("pipeline=2,shard=2", 4, {"schedule": "1f1b"}),
    "pipeline x replicate": ("pipeline=2,replicate=2", 4, {"schedule": "1f1b"}),
}


def cell(name: str, out: Path) -> list[tuple[Memory, Found]]:
    """Each pipeline coordinate's peak as said, and as counted in a run."""
    layout, accumulation, more = CELLS[name]
    mesh = Mesh.parse(layout)
    whole = MICRO_BATCH * accumulation * mesh.replicate * mesh.shard
    found = measured(CASE, out, mesh.size, mesh=layout, micro_batch=MICRO_BATCH, global_batch=whole, **more)
    said = predicted(CASE, layout, MICRO_BATCH, accumulation=accumulation, **more)
    return [(memory, found[memory.rank]) for memory in said]


def main() -> None:
    """The table of all cells, or of those named."""
    for name in sys.argv[1:] or CELLS:
        with tempfile.TemporaryDirectory() as folder:
            for said, real in cell(name, Path(folder)):
                error = said.total_bytes / real.peak - 1
                print(
                    f"| {name} | {CELLS[name][0]} | {said.rank} | {real.peak / 1e6:.3f} | {said.total_bytes / 1e6:.3f} "
                    f"| {error:+.2%} | {said.moment} |", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
