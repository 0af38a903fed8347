"""What one rank of a run under verification does: it writes down what it computes, step by step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.numpy import save_file
from torch import Tensor

from shoal.core.errors import ModelError
from shoal.engine.build import Place, build
from shoal.engine.forward import Pass
from shoal.engine.names import plain
from shoal.engine.randomness import key
from shoal.engine.run import Hooks, Run
from shoal.engine.state import model_tensors
from shoal.engine.step import StepReport, Verdict
from shoal.job import Loss
from shoal.launch.train import Entry
from shoal.launch.watch import Beats
from shoal.launch.world import World, join
from shoal.verify.exact import Carried, Exactly, RandomForward, keep_all, perturb


class Held(NamedTuple):
    """What this rank holds of a tensor of ``shape``: regions, each with the offsets at which it begins in the whole."""

    shape: tuple[int, ...]
    regions: list[tuple[Tensor, tuple[int, ...]]]


def held(run: Run, name: str, tensor: Tensor) -> Held:
    """Which regions ``tensor`` holds of parameter ``name``, or of a gradient or moment of its shape."""
    if tensor.is_meta:
        return Held(run.held.shape(name, tensor), [])
    if not tensor.dim():  # a counter, which every rank keeps
        return Held((), [(tensor, ())])
    piece = run.held.piece(name, tensor)
    return Held(piece.shape, [(part.tensor, part.offsets) for part in piece.parts])


class Probe:
    """Writes each step's tensors to ``folder/step-S-rank-R.safetensors`` and the rest beside it as JSON.

    Tensors are called ``gradient/NAME``, ``weight/NAME``, ``buffer/NAME`` and ``optimizer/KEY/NAME`` with the model's
    own names; several regions of one are told apart by a number. Gradients are as the optimizer takes them.
    """

    def __init__(self, folder: Path, rank: int, mode: Exactly | None = None) -> None:
        self.folder, self.rank, self.mode = folder, rank, mode
        self.micros: list[dict[str, Any]] = []
        self.ids: list[list[int]] = []
        self.tensors: dict[str, Held] = {}
        self.random: RandomForward | None = None
        self.carried: Carried | None = None

    def takes(self, each: Pass) -> None:
        """The samples of the micro-batch."""
        self.ids.append(list(each.micro.ids))
        if self.mode is not None and each.seed is not None:
            seed, step, *_ = each.seed
            self.mode.keyed.takes(key(*each.seed), key(seed, step), tuple(each.micro.ids))

    def micro_batch(self, each: Pass, loss: Loss) -> None:
        """Losses stay on the device until the step's end."""
        number = each.seed[2] if each.seed else len(self.micros)
        self.micros.append({"number": number, "loss": loss.sum.detach().clone(), "count": loss.count})
        if self.carried is not None:
            self.carried.look()
        if self.random is not None:
            looked, self.random = self.random, None
            looked.end()
            if looked.found:
                raise ModelError(
                    f"{looked.found} draws random numbers in forward, and each layout draws others, so that "
                    "nothing could be compared (of dropout the masks are made alike); give a field of the job that "
                    "switches it off"
                )

    def gradients(self, run: Run, verdict: Verdict) -> None:
        """Every gradient times the factor. The optimizer comes next."""
        if self.mode is not None:
            self.mode.paused = True
        for name, param in run.model.named_parameters():
            if param.grad is not None and not param.is_meta:
                self._keep(run, "gradient", plain(name), param.grad.detach() * verdict.factor)

    def stepped(self, run: Run, report: StepReport) -> None:
        """Weights, buffers and optimizer; then all of the step goes to disk."""
        if self.mode is not None:
            self.mode.paused = False
            self.mode.keyed.forget()
        weights = {plain(name) for name, _ in run.model.named_parameters()}
        for full, tensor in model_tensors(run.model)[0].items():
            name = full.removeprefix("model/")
            self._keep(run, "weight" if name in weights else "buffer", name, tensor)
        for full, tensor in run.optimizer.tensors().items():
            _, kind, name = full.split("/", 2)
            self._keep(run, f"optimizer/{kind}", name, tensor.detach())
        self._write(run, report)

    def _keep(self, run: Run, kind: str, name: str, tensor: Tensor) -> None:
        self.tensors[f"{kind}/{name}"] = held(run, name, tensor)

    def _write(self, run: Run, report: StepReport) -> None:
        arrays, facts = {}, {}
        for name, (shape, regions) in self.tensors.items():
            for number, (tensor, offsets) in enumerate(regions):
                narrow = tensor.is_floating_point() and tensor.element_size() < 4
                local = (tensor.float() if narrow else tensor).detach().cpu().contiguous()
                pair = tensor.is_complex()  # its parts are two numbers along a dimension of their own
                arrays[f"{name}#{number}"] = (torch.view_as_real(local.resolve_conj()) if pair else local).numpy()
                facts[f"{name}#{number}"] = {
                    "name": name,
                    "shape": (*shape, 2) if pair else shape,
                    "offsets": (*offsets, 0) if pair else offsets,
                }
        stem = f"step-{report.step}-rank-{self.rank}"
        save_file(arrays, self.folder / f"{stem}.safetensors")
        micros = [
            {"number": m["number"], "loss": float(m["loss"]), "count": float(m["count"])}
            for m in sorted(self.micros, key=lambda m: m["number"])
        ]
        told = {
            "loss": report.loss, "lr": report.lr, "grad_norm": report.grad_norm, "applied": report.applied,
            "reason": report.reason,
            "count": report.count, "data_rank": run.layout.data_rank, "at": run.layout.at._asdict(),
            "ids": self.ids, "micros": micros, "tensors": facts,
        }  # fmt: skip
        (self.folder / f"{stem}.json").write_text(json.dumps(told))
        self.micros, self.ids, self.tensors = [], [], {}


@dataclass
class ProbedEntry(Entry):
    """A worker that trains under a probe. ``unit``: perturb the weights by so much of themselves first (0: not)."""

    folder: str = ""
    unit: float = 0.0
    device: str = "cpu"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "folder": self.folder, "unit": self.unit, "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.folder, self.unit, self.device = state["folder"], state["unit"], state["device"]

    def _train(self, world: World, beats: Beats) -> int:
        device = join(world, self.device)
        notes: list[str] = []
        mode = Exactly(lift=self.settings.precision == "fp64")
        probe = Probe(Path(self.folder), world.rank, mode)
        hooks = Hooks(beat=beats.beat, tell=notes.append, observer=probe)
        torch.autograd.set_multithreading_enabled(False)  # recomputation in backward is to be seen by the mode too
        with mode:
            run = build(self.job, self.settings, Place(device), hooks)
            described = [
                {"name": plain(name), "module": type(run.model.get_submodule(name.rpartition(".")[0])).__name__}
                for name, _ in [*run.model.named_parameters(), *run.model.named_buffers()]
            ]
            mode.off |= keep_all(run.model)
            mode.keyed.watch(run.model)
            if world.size == 1:
                probe.random, probe.carried = RandomForward(run.model, device), Carried(run.model)
                if self.unit:
                    perturb(run.model, self.unit)
            for window in run.windows():
                run.step(window)
        told = {
            "names": described, "trained": run.trained, "keyed": mode.keyed.used, "off": sorted(mode.off),
            "lifted": mode.lifted, "carried": sorted(probe.carried.found) if probe.carried else [],
            "plan": run.layout.plan.model_dump(mode="json"), "steps": run.step_count,
            "notes": notes,
        }  # fmt: skip
        run.close()
        (Path(self.folder) / f"rank-{world.rank}.json").write_text(json.dumps(told))
        return 0
