"""Gradients in shards: summed over the ranks by FSDP2, held against the whole world by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.core.errors import ModelError
from shoal.parallel.replicate.buckets import GradientBuckets, Tie
from shoal.parallel.shard.apply import Sharded
from shoal.parallel.shard.pieces import is_first_copy, local


class ShardedGradients:
    """What ``GradientBuckets`` is for whole weights: gradients of ``parameters``, summed, never divided.

    Level 3 and 2 reduce-scatter each unit at each micro-batch, level 1 at the window's last. Copies of shards
    (hybrid) are summed at the last one. Parameters without dimensions are whole and have a bucket.
    """

    def __init__(
        self,
        sharded: Sharded,
        parameters: Sequence[tuple[str, nn.Parameter]],
        ties: Mapping[str, Tie] | None = None,
        uncounted: frozenset[str] = frozenset(),
    ) -> None:
        self.sharded, self.parameters, self.uncounted = sharded, parameters, uncounted
        split = [(name, param) for name, param in parameters if name not in sharded.whole]
        kept = [(name, param) for name, param in parameters if name in sharded.whole]
        strange = next((name for name, param in split if not isinstance(param, DTensor)), None)
        if strange is not None:
            raise ModelError(
                f"{strange} was given whole, as a forward had gathered it; take a sharded model's parameters before "
                "its first forward, or after Sharded.release()"
            )
        self.split = split
        self.whole = GradientBuckets(kept, 25 << 20, sharded.group, ties or {}, uncounted) if kept else None
        self._filled: set[int] = set()
        self._kept: dict[int, Tensor] = {}
        self._last: bool | None = None
        for path in () if sharded.staged else sharded.units:
            self._watch(path)

    def _watch(self, path: str) -> None:
        """Note which parameters get a gradient: hooks on the whole weights, which exist once a unit was gathered."""
        wanted = {id(param) for _, param in self.split}
        unit = self.sharded.model.get_submodule(path)
        below = [self.sharded.units[other] for other in self.sharded.units if other != path] if not path else []
        inner = {id(m) for other in below for m in other.modules()}  # type: ignore[attr-defined]
        places = [
            (module, name, id(param))
            for module in unit.modules()
            if id(module) not in inner
            for name, param in module._parameters.items()
            if param is not None and id(param) in wanted
        ]

        def gathered() -> None:
            for place in [*places]:
                module, name, key = place
                param = module._parameters[name]
                if isinstance(param, DTensor) or param is None or not param.requires_grad:
                    continue
                places.remove(place)
                param.register_post_accumulate_grad_hook(lambda _, key=key: self._filled.add(key))

        self.sharded.turns.on_gathered[path] = gathered

    def start_window(self) -> None:
        """Forget the last window's gradients."""
        self._filled.clear()
        self._kept.clear()
        for _, param in self.split:
            param.grad = None
        if self.whole is not None:
            self.whole.start_window()

    def start_backward(self, last: bool) -> None:
        """Before each micro-batch: what is reduced after it and what stays whole."""
        if self.whole is not None:
            self.whole.start_backward(last)
        if last is self._last:
            return
        self._last = last
        level = self.sharded.settings.level
        for unit in self.sharded.units.values():
            unit.set_requires_gradient_sync(last or level > 1, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or level == 3, recurse=False)

    def release(self) -> None:
        """After an evaluation: weights that it left whole are given up."""
        self.sharded.release()

    def start_schedule(self) -> None:
        """Before a pipeline's schedule: nothing is reduced or given up until ``gather``."""
        for unit in self.sharded.units.values():
            unit.set_is_last_backward(False)
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_backward(False)

    def gather(self) -> None:
        """Collective. After a pipeline's schedule: reduce what its backwards left, also where they were split."""
        owner = {id(param) for _, param in self.split}
        for unit in self.sharded.units.values():
            state = fully_shard.state(unit)  # type: ignore[attr-defined]  # as torch's own pipeline runtime does
            unit.set_is_last_backward(True)
            unit.set_requires_gradient_sync(True)
            unit.set_reshard_after_backward(True)
            for group in state._fsdp_param_groups:
                for each in group.fsdp_params:
                    whole = getattr(each, "_unsharded_param", None)
                    got = each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
                    if got and id(each.sharded_param) in owner:
                        self._filled.add(id(each.sharded_param))
                group.post_backward()
            state._root_post_backward_final_callback()
        if self.whole is not None:
            self.whole.gather()

    def finish(self) -> None:
        """Collective. After it every gradient is summed and every weight a shard. Raises ModelError."""
        if self.whole is not None:
            self.whole.finish()
        self.sharded.release()
        for name, param in self.split:
            if param.grad is None and id(param) in self._filled:
                raise ModelError(
                    f"the gradient of {name} was not reduced: its unit's output did not reach the loss through the "
                    "model's output, or was changed in place; return it from the model's forward"
                )
            if param.grad is not None:
                self._kept[id(param)] = param.grad

    def used(self) -> list[float]:
        """1.0 for each parameter, in order, that received a gradient on this rank in this window."""
        whole = dict(zip((n for n, _ in self.whole.parameters), self.whole.used(), strict=True)) if self.whole else {}
        return [whole.get(name, float(id(param) in self._filled)) for name, param in self.parameters]

    def squared_norm(self, dtype: torch.dtype | None) -> Tensor:
        """This rank's share of the squared norm (float64 scalar): summed over ranks it counts every gradient once."""
        counted = [self._kept.get(id(param)) for name, param in self.split if name not in self.uncounted]
        parts = [local(grad) for grad in counted if grad is not None and is_first_copy(grad)]
        parts = [part for part in parts if part.numel()]
        device = self.sharded.mesh.device_type
        total = torch.zeros((), dtype=torch.float64, device=device)
        if parts:
            norms = torch._foreach_norm(parts, 2, dtype=dtype)
            total += torch.stack(norms).double().square().sum().to(device)
        return total if self.whole is None else total + self.whole.squared_norm(dtype)

    def assign(self, used: Iterable[bool]) -> None:
        """Give every parameter used on any rank its summed gradient; the others get None, as on one device."""
        chosen = dict(zip((name for name, _ in self.parameters), used, strict=True))
        for name, param in self.split:
            param.grad = self._kept.get(id(param)) if chosen[name] else None
        if self.whole is not None:
            self.whole.assign(chosen[name] for name, _ in self.whole.parameters)

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        parts = [local(grad) for grad in self._kept.values()]
        if parts:
            torch._foreach_mul_(parts, factor)
        if self.whole is not None:
            self.whole.scale(factor)

    def first_non_finite(self) -> str | None:
        """Collective. The name of the first parameter whose summed gradient has a NaN or an infinity."""
        bad = {name for name, param in self.split if not torch.isfinite(local(self._kept.get(id(param), param))).all()}
        if self.whole is not None:
            bad |= {n for n, p in self.whole.parameters if p.grad is not None and not torch.isfinite(p.grad).all()}
        names = [name for name, _ in self.parameters]
        first = next((place for place, name in enumerate(names) if name in bad), len(names))
        found = torch.tensor(first, device=self.sharded.mesh.device_type)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.sharded.group)
        return [*names, None][int(found)]
