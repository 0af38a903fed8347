"""Whether derived tensor roles are those of a plan that a model's configuration carries. No torch.

Such a plan (``base_model_tp_plan`` of a Hugging Face configuration) gives styles by name pattern, ``*`` for a number:
``layers.*.mlp.up_proj: colwise``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.blueprint.roles import Roles

#: The roles that are a style. Gathered outputs and split inputs are the plan's way around a fused projection.
STYLES = {
    **dict.fromkeys(
        ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), ("column", "packed column", "vocabulary")
    ),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"), ("row",)),
    "embedding_rowwise": ("vocabulary",),
    **dict.fromkeys(
        ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce"), ("replicated",)
    ),
}


def differences(roles: Roles, plan: Mapping[str, str]) -> list[str]:
    """A line for each pattern of ``plan`` whose parameters have another role. Patterns may leave out the first part of
    the names; those that name no parameter of two dimensions, or one replicated, of this model say nothing about it."""
    found = []
    for pattern, style in plan.items():
        named = _named(roles, pattern)
        if named and style not in STYLES:
            found.append(f"{pattern} is {style} in the configuration's tensor plan, which is no known style")
        others = [name for name in named if style in STYLES and roles.role[name].kind not in STYLES[style]]
        if others:
            first = others[0]
            reason = f": {roles.reasons[first]}" if first in roles.reasons else ""
            found.append(
                f"{pattern} is {style} in the configuration's tensor plan, {first} is {roles.role[first].kind}{reason}"
            )
    return found


def _named(roles: Roles, pattern: str) -> list[str]:
    """The weights that a pattern names."""
    numbers = re.escape(pattern).replace(r"\*", r"\d+")
    wanted = re.compile(rf"(.+\.)?{numbers}(\.weight)?")
    return [name for name in roles.role if wanted.fullmatch(name)]
