"""A state of many kinds of tensors, and what each rank of a mesh holds of it: no process group needed."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.checkpoint.saving import writers

from shoal.checkpoint import Part, Piece, Writer
from shoal.plan.mesh import Mesh
from shoal.plan.ranks import coordinates, group

HEADS, KEY_HEADS, WIDTH = 4, 2, 8  # fewer key than query heads: under tensor 4 two ranks hold the same ones

#: tensor -> (axis that tensor ranks split, lengths of the parts packed along it, how many ways each may be split)
ROLES = {
    "embed.weight": (0, (61,), (99,)),
    "qkv.weight": (0, (8, 4, 4), (HEADS, KEY_HEADS, KEY_HEADS)),
    "qkv.bias": (0, (8, 4, 4), (HEADS, KEY_HEADS, KEY_HEADS)),
    "out.weight": (1, (8,), (HEADS,)),
    "up.weight": (0, (16, 16), (99, 99)),
    "down.weight": (1, (16,), (99,)),
    "head.weight": (0, (61,), (99,)),
}
SHAPES = {
    "qkv.weight": (16, 8),
    "qkv.bias": (16,),
    "out.weight": (8, 8),
    "norm.weight": (8,),
    "up.weight": (32, 8),
    "down.weight": (8, 16),
}


def whole_state() -> dict[str, torch.Tensor]:
    """Weights, buffers of several dtypes, AdamW's moments and counters; every element is another value."""
    generator = torch.Generator().manual_seed(0)
    weights = {"embed.weight": (61, WIDTH)}
    weights.update({f"blocks.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()})
    weights["head.weight"] = (61, WIDTH)
    state = {}
    for number, (name, shape) in enumerate(weights.items()):
        weight = torch.randn(shape, generator=generator)
        state[f"model/{name}"] = weight.to(torch.bfloat16) if "norm" in name else weight
        state[f"optimizer/exp_avg/{name}"] = torch.randn(shape, generator=generator).double()
        state[f"optimizer/step/{name}"] = torch.tensor(float(number))
    state["model/blocks.1.mask"] = torch.rand(5, 7, generator=generator) > 0.5
    state["model/blocks.0.seen"] = torch.tensor(7)
    state["model/blocks.1.none"] = torch.empty(0, 3)
    return state


def stage_of(name: str) -> int:
    return int("blocks.1" in name or "head" in name)


def segments(name: str, shape: torch.Size, mesh: Mesh, place: int) -> tuple[int, list[tuple[int, int, bool]]]:
    """The axis that tensor ranks split, and this place's runs along it: (start, length, whether others hold it)."""
    role = next((role for suffix, role in ROLES.items() if name.endswith(suffix)), None)
    if role is None or not shape:
        return 0, [(0, shape[0] if shape else 1, True)]
    axis, packed, ways = role
    runs, begin = [], 0
    for length, most in zip(packed, ways, strict=True):
        degree = min(mesh.tensor, most)
        rows = -(-length // degree)
        start = min(length, rows * (place * degree // mesh.tensor))
        runs.append((begin + start, min(rows, length - start), degree < mesh.tensor))
        begin += length
    return axis, runs


def held(whole: dict[str, torch.Tensor], mesh: Mesh, rank: int) -> dict[str, Piece]:
    """What a rank of the mesh holds: its stage's tensors, their tensor part, of that its chunk of rows."""
    at = coordinates(mesh, rank)
    pieces = {}
    for name, tensor in whole.items():
        if mesh.pipeline > 1 and stage_of(name) != at.pipeline:
            continue
        axis, runs = segments(name, tensor.shape, mesh, at.tensor)
        split = next((key for key in ROLES if name.endswith(key)), None) if tensor.ndim else None
        parts, seen = [], 0
        rows = sum(length for _, length, _ in runs) if axis == 0 else (tensor.shape[0] if tensor.ndim else 1)
        chunk = -(-rows // mesh.shard)
        first, last = min(rows, chunk * at.shard), min(rows, chunk * (at.shard + 1))
        for start, length, shared in runs:
            axes = ["replicate", "context"] + (["shard"] if not tensor.ndim else [])
            if split is None or mesh.tensor == 1:
                axes.append("tensor")
            holders = group(mesh, axes, rank)
            if shared and split is not None and mesh.tensor > 1:
                holders = tuple(
                    sorted(
                        peer
                        for tensor_peer in group(mesh, "tensor", rank)
                        if (start, length, shared)
                        in segments(name, tensor.shape, mesh, coordinates(mesh, tensor_peer).tensor)[1]
                        for peer in group(mesh, ["replicate", "context"], tensor_peer)
                    )
                )
            if not tensor.ndim:
                parts.append(Part(tensor.clone(), (), holders))
                continue
            if axis == 0:
                low, high = max(first, seen), min(last, seen + length)
                offset, count, columns = start + low - seen, max(0, high - low), (0, None)
            else:
                offset, count, columns = first, last - first, (start, length)
            seen += length
            part = tensor.narrow(0, offset if count else 0, count)
            offsets = [offset if count else 0] + [0] * (tensor.ndim - 1)
            if columns[1] is not None:
                part, offsets[1] = part.narrow(1, columns[0], columns[1]), columns[0]
            if part.ndim == 2:  # of strides that no file has
                part = part.t().contiguous().t()
            parts.append(Part(part.clone(memory_format=torch.preserve_format), tuple(offsets), holders))
        pieces[name] = Piece(tuple(tensor.shape), tuple(parts))
    return pieces


LAYOUTS = {
    str(mesh): mesh
    for mesh in (
        Mesh(),
        Mesh(replicate=4),
        Mesh(shard=4),
        Mesh(shard=3),
        Mesh(tensor=2),
        Mesh(tensor=4),
        Mesh(pipeline=2),
        Mesh(pipeline=2, tensor=2),
        Mesh(pipeline=2, shard=2),
        Mesh(replicate=2, shard=2),
        Mesh(replicate=2, tensor=2),
        Mesh(shard=2, tensor=2),
        Mesh(pipeline=2, replicate=2, tensor=2),
        Mesh(shard=2, tensor=4),
    )
}


def save_held(folder: Path, step: int, every: list[dict[str, Piece]]) -> list[Writer]:
    """A whole save, each rank with what it holds; errors stay in the writers."""
    group = writers(folder, len(every))
    for writer, pieces in zip(group, every, strict=True):
        writer.begin(step, pieces, {"step": step})
    for writer in group:
        writer.wait()
        assert writer.poll() == (True, False), writer.error()
    for writer in reversed(group):
        writer.commit()
        writer.wait()
    return group
