"""Dividing a model's weights over the ranks of a tensor group, in place, by their roles.

A parameter stays the object that it was, under its own name, and holds this rank's part: optimizers, gradient
buckets, hooks and ties see a plain, smaller parameter. While a module runs that reads it, its attribute shows a
``Part`` instead (part.py), which the module's own code uses as if it were whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.blueprint.facts import Blueprint
from shoal.blueprint.positions import Positions
from shoal.blueprint.roles import Roles
from shoal.blueprint.split import Split
from shoal.blueprint.structures import mapped
from shoal.core.errors import ModelError
from shoal.parallel.tensor.moves import Group, part_of
from shoal.parallel.tensor.part import Part, marked, plain


class Layout:
    """How a model's parameters lie over a tensor group."""

    def __init__(self, model: nn.Module, roles: Roles, group: Group, positions: Mapping[str, Positions]) -> None:
        self.model, self.roles, self.group, self.positions = model, roles, group, positions
        names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self.first = {name: names[id(p)] for name, p in every}
        self.whole = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def split(self, name: str) -> Split | None:
        """How a parameter is divided."""
        return self.roles.role[self.first[name]].split


def apply(
    model: nn.Module, blueprint: Blueprint, roles: Roles, mesh: DeviceMesh,
    positions: Mapping[str, Positions] | None = None,
) -> Layout:  # fmt: skip
    """Divide ``model`` in place. Call it before the optimizer is made. Gradients need no further sum afterwards.

    ``mesh``: one dimension, of as many ranks as ``roles`` are for. ``positions``: layers of which a rank keeps its
    positions of the results (sequence parallelism), by the weight's first name. Raises ModelError where the mesh is
    another.
    """
    if mesh.ndim != 1 or mesh.size() != roles.degree:
        raise ModelError(
            f"tensor roles for {roles.degree} ranks were given a mesh of shape {tuple(mesh.shape)}; "
            "give the tensor axis alone, and roles for its size"
        )
    group = Group(mesh.get_group(), roles.degree, mesh.get_local_rank())
    parameters = dict(model.named_parameters())
    _check(roles, {name: tuple(p.shape) for name, p in parameters.items()})
    layout = Layout(model, roles, group, positions or {})
    for name, parameter in parameters.items():
        split = roles.role[name].split
        if split is not None:
            parameter.data = part_of(parameter.data, split, group).clone(memory_format=torch.contiguous_format)
    _show(model, blueprint, layout)
    model.register_forward_hook(_outputs)
    return layout


def _check(roles: Roles, shapes: dict[str, tuple[int, ...]]) -> None:
    if roles.role.keys() != shapes.keys():
        different = sorted(roles.role.keys() ^ shapes.keys())[:3]
        raise ModelError(
            f"the tensor roles are for another model: parameters differ, for example {different}; derive them anew"
        )
    for name, role in roles.role.items():
        if role.split is not None and shapes[name][role.split.dim] != role.split.size:
            raise ModelError(
                f"the tensor role of {name!r} divides {role.split.size} entries of dimension {role.split.dim}, "
                f"found a shape of {shapes[name]}; derive the roles from this model"
            )


class _Shown:
    """Hooks of a module that reads divided parameters: while it runs, their attributes are parts."""

    def __init__(self, reads: list[tuple[nn.Module, str, Split, Positions | None]], group: Group) -> None:
        self.reads, self.group = reads, group
        self.before: list[list[Any]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before the module's forward."""
        self.group.running += 1
        saved = []
        for owner, leaf, split, positions in self.reads:
            parameter = owner._parameters[leaf]
            if not isinstance(parameter, nn.Parameter) or isinstance(parameter, DTensor):
                continue  # sharded over another axis: whole again when its own module runs
            saved.append((owner, leaf, owner.__dict__.get(leaf)))
            with torch._C.DisableTorchFunction():  # no operation of the model's own
                part = marked(parameter.view_as(parameter), split, self.group, positions)
                part._stands_for_parameter = True  # type: ignore[attr-defined]
            owner.__dict__[leaf] = part
        self.before.append(saved)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it, also where it failed."""
        if not self.before:
            return
        self.group.running -= 1
        if not self.group.running:
            self.group.entered = None  # nothing reads it again, and it may be large
        for owner, leaf, part in reversed(self.before.pop()):
            if part is None:
                owner.__dict__.pop(leaf, None)
            else:
                owner.__dict__[leaf] = part


def _show(model: nn.Module, blueprint: Blueprint, layout: Layout) -> None:
    """Hook every module whose own code reads a divided parameter, or works on parts.

    The model itself shows all of them: outside training, code may read them elsewhere than in the traced forward
    (fused encoder layers of torch do).
    """
    names: dict[str, list[str]] = {}
    for name, first in layout.first.items():
        names.setdefault(first, []).append(name)
    reads: dict[str, dict[str, None]] = {"": {n: None for n in names if layout.split(n) is not None}}
    for operation in blueprint.operations:
        for name in operation.parameters:
            if name in layout.first and layout.split(name) is not None:
                reads.setdefault(operation.module, {})[layout.first[name]] = None
    for number in {number for region in layout.roles.regions for number in region.operations}:
        reads.setdefault(blueprint.operations[number].module, {})
    for path, firsts in reads.items():
        shown = []
        for name in (name for first in firsts for name in names[first]):
            owner, _, leaf = name.rpartition(".")
            shown.append(
                (model.get_submodule(owner), leaf, layout.split(name), layout.positions.get(layout.first[name]))
            )
        hooks = _Shown(shown, layout.group)
        module = model.get_submodule(path)
        module.register_forward_pre_hook(hooks.enter)
        module.register_forward_hook(hooks.leave, always_call=True)


def _outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Collective where an output is a part. What leaves the model is whole, but for what is split along its last
    dimension: a head's logits stay parts, so that a loss of them need not gather them."""

    def left(tensor: Tensor) -> Tensor:
        logits = isinstance(tensor, Part) and tensor._split.dim == tensor.dim() - 1
        return tensor if logits else plain(tensor)

    return mapped(left, output)
