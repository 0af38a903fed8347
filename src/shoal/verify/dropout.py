"""Dropout whose masks no layout changes: keyed by seed, step, place in the forward, sample and element.

Every call of a module has a token, worked out from its caller's token and how many calls came before it there, and
torch's CPU generator stands at that token while the module runs. Checkpointing keeps the generator's state, so a
recomputed block finds its token again, and with it its samples and masks. Nothing is drawn from the generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from shoal.core.errors import ModelError
from shoal.engine.randomness import key


class Form(NamedTuple):
    """A function with dropout: its arguments' names, and what is kept or dropped together: ``element``s, whole
    ``channel``s, or attention weights."""

    names: tuple[str, ...]
    kept: str


_CALL = ("input", "p", "training", "inplace")
FORMS: dict[Any, Form] = {
    F.dropout: Form(_CALL, "element"),
    torch.dropout: Form(("input", "p", "train"), "element"),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), Form(_CALL, "channel")),
    torch.feature_dropout: Form(("input", "p", "train"), "channel"),
    F.scaled_dot_product_attention: Form(
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), "attention"
    ),
}


class _Frame(NamedTuple):
    """A call of a module. ``site``: its place in the forward, the same in all layouts; ``ids``: its samples."""

    site: int
    ids: tuple[int, ...]
    path: str


class Keyed:
    """The masks of one rank's run. ``used``: whether any was made."""

    def __init__(self) -> None:
        self.used = False
        self._frames: dict[int, _Frame] = {}
        self._at = (0, -1)  # the token of the call under way, and the backward that recomputes it (-1: none)
        self._count = 0
        self.seen: int | None = None  # the place of a dropout that is on its way down from the model's code

    def takes(self, token: int, site: int, ids: tuple[int, ...]) -> None:
        """A micro-batch of samples ``ids`` (none: padding) begins. ``token``: the seed of its forward; ``site``: the
        same for all micro-batches of the step."""
        self._frames[token] = _Frame(site, ids, "")

    def forget(self) -> None:
        """The step is over."""
        self._frames.clear()

    def watch(self, model: nn.Module) -> None:
        """Give every call of a module of ``model`` its token. Around all else that was put around the call."""
        for path, module in model.named_modules():
            run = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = functools.partial(self._call, path, module is model, run)

    def _call(self, path: str, root: bool, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = self.next()
        outer = self._frames.get(self._at[0])
        if number is None or outer is None:
            return run(*args, **kwargs)  # not in a step
        before, state = (self._at, self._count), torch.default_generator.get_state()
        token = key(self._at[0], number)
        self._frames[token] = _Frame(key(outer.site, number), outer.ids, path)
        torch.default_generator.manual_seed(token)
        try:
            if not root:
                return run(*args, **kwargs)
            with _Places(self):
                return run(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)
            self._at, self._count = before

    def next(self) -> int | None:
        """How many calls and dropouts came before in the call under way; None outside of a step's forward."""
        at = (torch.default_generator.initial_seed(), torch._C._current_graph_task_id())
        if at != self._at:  # another micro-batch, or a block begins to be recomputed
            self._at, self._count = at, 0
        if at[0] not in self._frames:
            return None
        self._count += 1
        return self._count - 1

    def place(self) -> tuple[int, _Frame] | None:
        """The place of a dropout, and the call that it stands in."""
        number = self.seen if self.seen is not None else self.next()
        return None if number is None else (number, self._frames[self._at[0]])

    def mask(self, place: tuple[int, _Frame], like: Tensor, p: float, channels: bool = False) -> Tensor:
        """0 or 1 / (1 - p) for each element (channel) of ``like``, whose samples lie along a dimension.

        Raises ModelError where no dimension can be that of the samples.
        """
        number, (site, ids, path) = place
        shape = tuple(like.shape)
        dim = _samples_dim(shape, len(ids)) if ids else 0  # what padding gives counts nothing
        if dim is None:
            raise ModelError(
                f"dropout in {path or 'the model'} works on a tensor of shape {list(shape)}, in which no dimension is "
                f"that of the micro-batch's {len(ids)} samples, so that its mask cannot be the same in every layout; "
                "give a field of the job that switches it off"
            )
        if channels:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        self.used = True
        row = (*shape[:dim], shape[dim] // max(1, len(ids)), *shape[dim + 1 :])
        drawn = [
            torch.rand(row, generator=torch.Generator().manual_seed(key(site, number, sample)), dtype=torch.float64)
            for sample in ids or (-1,)
        ]
        kept = (torch.cat(drawn, dim) >= p).to(like.device, like.dtype)
        return kept / (1 - p) if p < 1 else kept


class _Places(TorchFunctionMode):
    """Counts dropouts where the model's code calls them, those of other pipeline stages too."""

    def __init__(self, keyed: Keyed) -> None:
        super().__init__()
        self.keyed = keyed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FORMS:
            return func(*args, **(kwargs or {}))
        self.keyed.seen = self.keyed.next()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.keyed.seen = None


def dropped(keyed: Keyed, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What ``func`` of FORMS gives with the keyed mask."""
    names, kept = FORMS[func]
    given = dict(zip(names, args, strict=False)) | kwargs
    if kept == "attention":
        return _attention(keyed, given)
    p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    if not training or not p:
        return func(*args, **kwargs)
    place = None if isinstance(given["input"], FakeTensor) else keyed.place()
    mask = 1.0 if place is None else keyed.mask(place, given["input"], p, kept == "channel")
    return given["input"].mul_(mask) if given.get("inplace") else given["input"] * mask


def _attention(keyed: Keyed, given: dict[str, Any]) -> Tensor:
    """scaled_dot_product_attention by its definition, which has the weights to drop from."""
    query, keys, values, p = given["query"], given["key"], given["value"], given.get("dropout_p", 0.0)
    place = keyed.place() if p and not isinstance(query, FakeTensor) else None
    if place is None:
        return F.scaled_dot_product_attention(**{**given, "dropout_p": 0.0})
    if given.get("enable_gqa"):
        times = query.shape[-3] // keys.shape[-3]
        keys, values = keys.repeat_interleave(times, -3), values.repeat_interleave(times, -3)
    scale, mask = given.get("scale"), given.get("attn_mask")
    scores = query @ keys.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return weights * keyed.mask(place, weights, p) @ values


def _samples_dim(shape: tuple[int, ...], samples: int) -> int | None:
    """The dimension along which the samples lie, each in as many rows: the first one of three or more dimensions that
    is exactly as long, else the first."""
    exact = [dim for dim in (0, 1) if dim < len(shape) - 1 and shape[dim] == samples]
    if exact or not shape:
        return exact[0] if exact else None
    return 0 if shape[0] and shape[0] % samples == 0 else None
