"""A model that no rank holds whole: shapes first, and once it is known what this rank holds of it, weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.blueprint.structures import mapped, tensors
from shoal.core.errors import ConfigError, ModelError
from shoal.data.randomness import undisturbed
from shoal.engine.held import Held
from shoal.engine.names import plain
from shoal.engine.recorded import REGISTERED, NotReplayable, Place, Recording, held_tensors, record, replay, view
from shoal.parallel.pipeline.units import has_parameters, unit_paths
from shoal.parallel.shard.apply import Sharded
from shoal.parallel.shard.pieces import local

with FakeTensorMode():
    _OF_FAKES = {*vars(torch.empty(0)), "_is_param"}  # attributes that every fake tensor has

Take = Callable[[Any, Tensor], None]


class Values(Protocol):
    """Where the first values of a model's tensors come from."""

    def give(self, names: Iterable[str], take: Take) -> None:
        """Call ``take(name, whole tensor)`` for each of some parameters and buffers, in any order."""
        ...


@dataclass
class Start:
    """A model about to be divided. ``values`` is None where it has its own; ``whole``: why it was built whole."""

    model: nn.Module
    values: Values | None = None
    whole: str | None = None

    def strip(self) -> None:
        """The model keeps its structure and gives up its data: parameters, and buffers of units, are shapes only."""
        if self.values is None:
            self.values = _Built({name: tensor.detach() for name, tensor in _named(self.model).items()})
            replace(self.model, _shapes(self.model))

    def fill(
        self, held: Held, elsewhere: frozenset[str], sharded: Sharded | None, device: torch.device, loaded: bool
    ) -> None:
        """Memory for what this rank holds, and its first values.

        ``elsewhere``: names of what other stages hold, which stays shapes only. ``loaded``: parameters and what else a
        checkpoint holds get their values later, so that none is computed here.
        """
        model = self.model
        offloaded = sharded is not None and sharded.settings.cpu_offload
        mine = {name: t for name, t in _named(model).items() if local(t).is_meta and name not in elsewhere}
        new: dict[int, Tensor] = {}
        for tensor in {id(tensor): tensor for tensor in mine.values()}.values():
            place = "cpu" if offloaded and isinstance(tensor, DTensor) else device
            new[id(tensor)] = _as(tensor, torch.empty_like(tensor, device=place, requires_grad=False))
        replace(model, new, elsewhere)
        if sharded is not None:
            for unit in sharded.units.values():
                for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
                    for each in group.fsdp_params:
                        each.reset_sharded_param()
        saved = {plain(name) for name in model.state_dict(keep_vars=True)} if loaded else set()
        first = {id(tensor): name for name, tensor in reversed(mine.items())}
        wanted = {name: new[key] for key, name in first.items() if name not in saved}

        def take(name: str, whole: Tensor) -> None:
            with torch.no_grad():
                for part in held.piece(name, wanted[name].detach()).parts:
                    part.tensor.copy_(part.box.of(whole))

        assert self.values is not None
        self.values.give(wanted, take)


class Unknown:
    """Values that nobody gives: whatever the memory holds."""

    def give(self, names: Iterable[str], take: Take) -> None:
        """Nothing."""


class _Built:
    """Values of a model that was built whole; each is given up as it is taken."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values

    def give(self, names: Iterable[str], take: Take) -> None:
        for name in names:
            take(name, self.values.pop(name))
        self.values.clear()


class _Replayed:
    """Values that a recorded construction gives, one storage at a time."""

    def __init__(self, recording: Recording, seed: Callable[[], None], dtype: torch.dtype | None) -> None:
        self.recording, self.seed, self.dtype = recording, seed, dtype
        self.places = {
            name: recording.place(tensor) if isinstance(tensor, FakeTensor) else tensor.detach()
            for name, tensor in _named(recording.model).items()
        }

    def digest(self) -> str:
        """Equal where other ranks would replay the same values into the same model."""
        facts = [
            (name, type(tensor).__name__, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in _named(self.recording.model).items()
        ]
        return self.recording.digest((facts, list(self.places.items())))

    def give(self, names: Iterable[str], take: Take) -> None:
        self.replay({name: self.places[name] for name in names}, take)

    def replay(self, places: Mapping[Any, Place | Tensor], take: Take) -> None:
        """Call ``take`` for each key; random states stay as they are outside."""
        waiting: dict[int, list[tuple[Any, Place]]] = {}
        for key, place in places.items():
            if isinstance(place, Place):
                waiting.setdefault(place.storage, []).append((key, place))
            else:
                take(key, place)

        def ready(storage: int, flat: Tensor) -> None:
            for key, place in waiting[storage]:
                take(key, view(flat, place))

        if waiting:
            with undisturbed(self.dtype), torch._C.DisableTorchFunction():
                replay(self.recording, self.seed, ready, set(waiting))


def check_module(model: Any) -> None:
    """Raises ConfigError unless what ``model()`` returned is a module, ModelError where it has nothing to train or a
    parameter without a shape."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model() returned {type(model).__name__}; return an nn.Module")
    if lazy := [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        raise ModelError(f"parameter {lazy[0]!r} has no shape yet; give lazy modules a batch in model()")
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters; give a model that has some to train")


def check_trains(model: nn.Module) -> None:
    """Raises ModelError where nothing is to be trained."""
    if not any(param.requires_grad for param in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient; unfreeze what should train")


def begin(
    make: Callable[[], nn.Module], seed: Callable[[], None], dtype: torch.dtype | None, whole: str | None = None
) -> Start:
    """Collective. What ``seed(); make()`` builds, with ``dtype`` as the default, before anything of it is held.

    Where a rank cannot replay the construction, or ranks would replay different ones, or there is a reason already
    (``whole``), all build it whole.
    """
    replayed, reason, digest = None, whole, ""
    if whole is None:
        with undisturbed(dtype):
            try:
                replayed = _Replayed(record(make, seed), seed, dtype)
                digest = replayed.digest()
            except NotReplayable as error:
                reason = str(error)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (reason, digest))
    reason = next((why for why, _ in every if why), None)
    if reason is None and len({found for _, found in every}) > 1:
        reason = "model() is built in another way on other ranks"
    if reason is not None or replayed is None:
        with undisturbed(dtype):
            seed()
            return Start(make(), None, reason)
    model = replayed.recording.model
    shapes, real = _shapes(model), {}
    others = {id(t): t for t in held_tensors(model) if isinstance(t, FakeTensor) and id(t) not in shapes}
    replayed.replay({key: replayed.recording.place(tensor) for key, tensor in others.items()}, real.__setitem__)
    replace(model, shapes | real)
    return Start(model, replayed)


def replace(model: nn.Module, new: Mapping[int, Tensor], but: frozenset[str] = frozenset()) -> None:
    """Put tensors in place of others, by identity, wherever modules have them; not under the plain names ``but``."""
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if id(tensor) in new and plain(f"{path}.{name}" if path else name) not in but:
                    held[name] = new[id(tensor)]  # type: ignore[assignment]
        for name, value in vars(module).items():
            if name not in REGISTERED and any(id(tensor) in new for tensor in tensors(value)):
                vars(module)[name] = mapped(lambda tensor: new.get(id(tensor), tensor), value)


def _shapes(model: nn.Module) -> dict[int, Tensor]:
    """Meta tensors for a model's parameters, and for the buffers of its units that have parameters, by identity.

    Raises ModelError where parameters share memory without being one: as parts they could not.
    """
    units = [model.get_submodule(path) for path in unit_paths(model)]
    blank = {id(b): b for unit in units if has_parameters(unit) for b in unit.buffers()}
    first: dict[tuple[int, Any], str] = {}
    for name, param in model.named_parameters():
        mark = param.untyped_storage()._cdata, param.storage_offset()
        if param.numel() and first.setdefault(mark, name) != name:
            raise ModelError(
                f"the parameters {first[mark]} and {name} share memory and are two, which a layout that divides the "
                "model cannot keep up; tie them by giving both modules one and the same nn.Parameter"
            )
        blank[id(param)] = param
    return {
        key: _as(t, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")) for key, t in blank.items()
    }


def _as(old: Tensor, made: Tensor) -> Tensor:
    """``made`` as what ``old`` is: a parameter with its attributes and hooks, or a plain tensor."""
    if not isinstance(old, nn.Parameter):
        return made
    param = nn.Parameter(made, old.requires_grad)
    vars(param).update({name: value for name, value in vars(old).items() if name not in _OF_FAKES})
    if old._backward_hooks:
        param._backward_hooks = old._backward_hooks
    return param


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their plain names."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {plain(name): tensor for name, tensor in every}
