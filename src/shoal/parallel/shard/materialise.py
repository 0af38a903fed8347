"""A model straight into shards: no rank ever holds it whole, and its first weights are those of ``model()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from shoal.blueprint.structures import mapped, tensors
from shoal.parallel.shard.apply import Sharded, apply
from shoal.parallel.shard.pieces import local, pieces
from shoal.parallel.shard.recorded import NotReplayable, Place, Recording, record, replay, view
from shoal.parallel.shard.spec import ShardSettings
from shoal.parallel.shard.units import shard_units


class Materialised(NamedTuple):
    """A sharded model; ``whole_bytes``: the most that was whole at once; ``note``: why it was built whole, if so."""

    sharded: Sharded
    whole_bytes: int
    note: str | None


def materialise(
    make: Callable[[], nn.Module],
    seed: Callable[[], None],
    mesh: DeviceMesh,
    settings: ShardSettings,
    device: torch.device,
    wide: torch.dtype | None = None,
) -> Materialised:
    """Collective. What ``seed(); make()`` builds, in shards on ``device``; narrower weights raised to ``wide``.

    The construction is recorded on tensors without data, and replayed in order; each weight is whole from its first
    draw that counts to its last change. A constructor that reads values or sets seeds is run whole, and ``note`` says
    so.
    """
    try:
        recording = record(make, seed)
    except NotReplayable as error:
        seed()
        model = make()
        _widen(model, wide)
        model.to(device)
        size = sum(param.numel() * param.element_size() for param in model.parameters())
        held = apply(model, _units(model, settings), mesh, settings)
        return Materialised(held, size, f"the model is built whole on every rank before it is sharded: {error}")
    places = _fill_with_meta(recording, wide)
    model = recording.model
    held = apply(model, _units(model, settings), mesh, settings)
    _allocate(model, torch.device("cpu") if settings.cpu_offload else device)
    most = _replay_into(model, recording, seed, places, device)
    return Materialised(held, most, None)


def _units(model: nn.Module, settings: ShardSettings) -> list[str]:
    return shard_units(model) if settings.units is None else list(settings.units)


def _widen(model: nn.Module, wide: torch.dtype | None) -> None:
    for param in model.parameters():
        param.data = param.data.to(_dtype(param, wide))


def _dtype(tensor: Tensor, wide: torch.dtype | None) -> torch.dtype:
    narrow = wide is not None and tensor.is_floating_point() and tensor.element_size() < wide.itemsize
    return wide if narrow and wide is not None else tensor.dtype


def _fill_with_meta(recording: Recording, wide: torch.dtype | None) -> dict[str, Place | Tensor]:
    """Put parameters on the meta device, tied ones once. Where each one's value comes from, by name."""
    found: dict[str, Place | Tensor] = {}
    made: dict[int, nn.Parameter] = {}
    alive = []  # so that no parameter's identity is used twice
    for path, module in recording.model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                meta = torch.empty(param.shape, dtype=_dtype(param, wide), device="meta")
                made[id(param)] = nn.Parameter(meta, param.requires_grad)
                found[f"{path}.{name}" if path else name] = (
                    recording.place(param) if isinstance(param, FakeTensor) else param.detach()
                )
            alive.append(param)
            module._parameters[name] = made[id(param)]
    return found


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the shards. Tied parameters stay one: ``to_empty`` would part those that are not in shards."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((module, name))
    kept = {id(module): dict(module._buffers) for module in model.modules()}
    for module in model.modules():
        module._buffers.clear()
    model.to_empty(device=device)
    for module in model.modules():
        module._buffers.update(kept[id(module)])
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _replay_into(
    model: nn.Module,
    recording: Recording,
    seed: Callable[[], None],
    places: dict[str, Place | Tensor],
    device: torch.device,
) -> int:
    params = dict(model.named_parameters())
    waiting: dict[int, list[tuple[str, Place]]] = {}
    for name, place in places.items():
        if isinstance(place, Place):
            waiting.setdefault(place.storage, []).append((name, place))
        else:
            _keep_shard(params[name], place)
    others = [(module, name) for module in model.modules() for name in [*module._buffers, *vars(module)]]
    buffers = {
        recording.place(tensor).storage
        for module, name in others
        for tensor in tensors(module._buffers.get(name, vars(module).get(name)))
        if isinstance(tensor, FakeTensor)
    }
    real: dict[int, Tensor] = {}

    def ready(storage: int, flat: Tensor) -> None:
        for name, place in waiting.get(storage, ()):
            _keep_shard(params[name], view(flat, place))
        if storage in buffers:
            real[storage] = flat

    def filled(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        place = recording.place(tensor)
        return view(real[place.storage], place).to(device)

    most = replay(recording, seed, ready, set(waiting) | buffers)
    for module, name in others:
        if name in module._buffers:
            module._buffers[name] = mapped(filled, module._buffers[name])
        elif name not in ("_parameters", "_buffers", "_modules"):
            vars(module)[name] = mapped(filled, vars(module)[name])
    return most


def _keep_shard(param: Tensor, whole: Tensor) -> None:
    with torch.no_grad():
        for piece in pieces(param):
            place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
            local(param)[piece.local].copy_(whole[place])
