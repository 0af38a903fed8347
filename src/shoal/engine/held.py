"""Which regions of the model's tensors this rank holds, and which other ranks hold the same: for saving and loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.checkpoint.boxes import Box
from shoal.checkpoint.pieces import Holders, Part, Piece
from shoal.checkpoint.reader import Reader
from shoal.core.errors import CheckpointError
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.ranks import coordinates, group, rank_of


class Span(NamedTuple):
    """``length`` places that lie at ``start`` in a whole dimension and at ``own`` in this rank's.

    ``peers``: the places on the tensor axis that hold the same ones; None: this rank's place alone.
    """

    start: int
    own: int
    length: int
    peers: tuple[int, ...] | None = None


class Packed(NamedTuple):
    """A parameter of ``shape`` of which tensor ranks hold some spans of dimension ``dim``, one behind the other."""

    shape: tuple[int, ...]
    dim: int
    spans: tuple[Span, ...]


class Held:
    """What this rank holds of each parameter, and of any tensor of the parameter's shape (moments, averages).

    A tensor is whole on every rank, unless it is a DTensor (whose mesh's dimensions are named as the plan's axes), its
    name is in ``packed`` (split over tensor ranks), or the mesh has stages: then this rank's stage alone holds it,
    or the places on the pipeline axis that ``stages`` names. A DTensor may hold rows of what a rank packs.
    ``tied``: {other name: first name} where tied parameters lie on different stages, which memory cannot tell.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        rank: int = 0,
        packed: Mapping[str, Packed] | None = None,
        stages: Mapping[str, tuple[int, ...]] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.mesh, self.rank = mesh or Mesh(), rank
        self.packed, self.stages, self.tied = packed or {}, stages or {}, tied or {}
        self._known: dict[tuple, Holders | None] = {}

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The whole parameter's shape; ``tensor`` is this rank's, or a placeholder for one held elsewhere."""
        return self.packed[name].shape if name in self.packed else tuple(tensor.shape)

    def piece(self, name: str, tensor: Tensor) -> Piece:
        """What ``tensor``, this rank's of parameter ``name`` or of its shape, is of the whole."""
        own, inner, split = _placed(name, tensor)
        packed = self.packed.get(name)
        if packed is None:
            return Piece(tuple(tensor.shape), (Part(own, inner.offsets, self._holders(name, split)),))
        self._check(name, packed, tensor)
        parts = []
        for span in packed.spans:
            box = _on(Box.whole(tensor.shape), packed.dim, span.own, span.length)
            if met := box.meet(inner):
                place = span.start + met.offsets[packed.dim] - span.own
                parts.append(
                    Part(
                        met.seen_from(inner.offsets).of(own),
                        _on(met, packed.dim, place, span.length).offsets,
                        self._holders(name, split, span.peers or (coordinates(self.mesh, self.rank).tensor,)),
                    )
                )
        return Piece(packed.shape, tuple(parts))

    def state(self, key: str, name: str, param: Tensor, value: Tensor) -> Piece:
        """What an optimizer's state tensor ``key`` of parameter ``name`` is of the whole. Raises CheckpointError.

        One of the parameter's shape lies as the parameter does; any other is equal on all ranks that hold a part of it.
        """
        if value.ndim and value.shape == param.shape:
            return self.piece(name, value)
        if value.ndim and (name in self.packed or isinstance(param, DTensor)):
            raise CheckpointError(
                f"cannot save the optimizer's {key!r} of {name}: it has shape {list(value.shape)}, this rank's part of "
                f"the parameter has {list(param.shape)}, so that where it lies in the whole is unknown; use an "
                "optimizer whose state has the parameter's shape, or a layout that does not split this parameter"
            )
        return Piece.whole(_placed(name, value)[0], self._holders(name, ()))

    @torch.no_grad()
    def read(self, reader: Reader, saved: str, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, of parameter ``name`` or of its shape, with its regions of a saved tensor."""
        for part in self.piece(name, tensor.detach()).parts:
            reader.read_into(saved, part.tensor, part.offsets)

    def read_state(self, reader: Reader, saved: str, name: str, param: Tensor) -> Tensor:
        """A saved state tensor of a parameter: this rank's part where it has the parameter's shape, else all of it."""
        shape, dtype = reader.shape(saved), reader.dtype(saved)
        if not shape or shape != self.shape(name, param):
            return reader.read(saved)
        if name not in self.packed and not isinstance(param, DTensor):
            return reader.read(saved)
        tensor = torch.empty_like(param, dtype=dtype, requires_grad=False)
        self.read(reader, saved, name, tensor)
        return tensor

    def _holders(self, name: str, split: tuple[str, ...], peers: tuple[int, ...] | None = None) -> Holders | None:
        """All ranks that hold the same: any place on the axes that split nothing, on the tensor axis ``peers``."""
        stages = self.stages.get(name)
        key = split, peers, stages
        if key not in self._known:
            if self.mesh.size == 1:
                self._known[key] = None
            else:
                fixed = {"pipeline", *split, *(["tensor"] if peers else [])}
                near = group(self.mesh, [axis for axis in AXES if axis not in fixed], self.rank)
                places = [coordinates(self.mesh, rank) for rank in near]
                if peers:
                    places = [place._replace(tensor=peer) for place in places for peer in peers]
                if stages:
                    places = [place._replace(pipeline=stage) for place in places for stage in stages]
                self._known[key] = tuple(sorted({rank_of(self.mesh, **place._asdict()) for place in places}))
        return self._known[key]

    def _check(self, name: str, packed: Packed, tensor: Tensor) -> None:
        held = sum(span.length for span in packed.spans)
        expected = (*packed.shape[: packed.dim], held, *packed.shape[packed.dim + 1 :])
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"the tensor of {name} has shape {list(tensor.shape)}, its spans make {list(expected)} of "
                f"{list(packed.shape)}; describe the parameter as it is split"
            )


def _on(box: Box, dim: int, start: int, length: int) -> Box:
    """The box with another place on one axis."""
    return Box((*box.offsets[:dim], start, *box.offsets[dim + 1 :]), (*box.shape[:dim], length, *box.shape[dim + 1 :]))


def _placed(name: str, tensor: Tensor) -> tuple[Tensor, Box, tuple[str, ...]]:
    """This rank's own memory, which region of ``tensor`` it is, and the axes that split it."""
    if not isinstance(tensor, DTensor):
        return tensor, Box.whole(tensor.shape), ()
    mesh, own = tensor.device_mesh, tensor.to_local()
    names, places = mesh.mesh_dim_names or (), mesh.get_coordinate()
    box, split = Box.whole(tensor.shape), []
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) or mesh.size(number) == 1:
            continue
        if type(placement) is not Shard or number >= len(names) or names[number] not in AXES or places is None:
            raise CheckpointError(
                f"cannot tell where this rank's part of {name} lies: it is placed as {tensor.placements} on a mesh of "
                f"dimensions {names}; use Shard and Replicate on dimensions named as the plan's axes, {', '.join(AXES)}"
            )
        dim, length = placement.dim, box.shape[placement.dim]
        chunk = -(-length // mesh.size(number))
        skipped = min(length, chunk * places[number])
        box = _on(box, dim, box.offsets[dim] + skipped, min(chunk, length - skipped))
        split.append(names[number])
    if tuple(own.shape) != box.shape:
        raise CheckpointError(
            f"this rank's part of {name} has shape {list(own.shape)}, its placements {tensor.placements} give "
            f"{list(box.shape)} of {list(tensor.shape)}; leave the parts of a DTensor as torch splits them"
        )
    return own, box, tuple(split)
