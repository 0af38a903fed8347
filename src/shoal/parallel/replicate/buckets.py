"""Gradients live in fixed flat buckets, summed over the ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.compress import Codec, Part, carries
from shoal.core.errors import ModelError

FIRST_BUCKET_BYTES = 1 << 20  # a small first bucket starts the links early (Li et al., VLDB 2020)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one size and type lie in the same place (told without addresses, which fake tensors
    have none of)."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


@dataclass
class _Bucket:
    flat: Tensor
    params: list[nn.Parameter]
    counts: bool  # in the norm
    coded: tuple[Part, ...] = ()  # where a codec carries it
    pending: int = 0
    work: dist.Work | None = None
    more: Iterator[dist.Work | None] = iter(())  # collectives that follow ``work``
    launched: bool = False


class Tie(NamedTuple):
    """A parameter that several ranks hold for different uses (tied weights of a pipeline): their gradients are summed.

    ``counts``: this rank is the one that counts it in the norm.
    """

    group: dist.ProcessGroup
    counts: bool


@dataclass
class GradientBuckets:
    """Sums gradients over ``group``. Gradients are views of the buckets, so they exist once.

    Buckets follow the parameters in reverse order of registration and never change. A bucket is sent when all
    of its gradients are there, in index order on every rank; what is missing (a parameter that took no part)
    counts as zero. Nothing is divided. ``codec``: in which the parameters that it carries travel, in buckets of
    their own that go first, each a stage further when the next one is sent. ``ties``: parameters whose gradient is
    then summed over their other holders. ``uncounted``: parameters whose gradient other ranks, which have it too,
    count in the norm.
    """

    parameters: Sequence[tuple[str, nn.Parameter]]
    bucket_bytes: int
    group: dist.ProcessGroup | None = None
    ties: Mapping[str, Tie] = field(default_factory=dict)
    uncounted: frozenset[str] = frozenset()
    codec: Codec | None = None
    buckets: list[_Bucket] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.ranks = dist.get_world_size(self.group)
        self._name = {id(param): name for name, param in self.parameters}
        self._view: dict[int, Tensor] = {}
        self._bucket_of: dict[int, _Bucket] = {}
        self._filled: set[int] = set()
        self._seen: set[int] = set()
        self._syncing = False
        self._next = 0
        for counts in (True, False):
            mine = [(name, param) for name, param in self.parameters if self._counts(name) is counts]
            for coded in (True, False):
                params = [param for name, param in mine if self._coded(param) is coded]
                for chosen in _partition(params, self.bucket_bytes):
                    self._add_bucket(chosen, counts, coded)
        for _, param in self.parameters:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def _counts(self, name: str) -> bool:
        return name not in self.uncounted and (name not in self.ties or self.ties[name].counts)

    def _coded(self, param: nn.Parameter) -> bool:
        return self.codec is not None and carries(self.codec.spec, param)

    def _add_bucket(self, params: list[nn.Parameter], counts: bool, coded: bool) -> None:
        flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
        bucket = _Bucket(flat, params, counts)
        offset = 0
        for param in params:
            self._view[id(param)] = _laid_as(param, flat[offset : offset + param.numel()])
            self._bucket_of[id(param)] = bucket
            offset += param.numel()
        if coded and self.codec is not None:
            bucket.coded = tuple(Part(self._name[id(param)], self._view[id(param)]) for param in params)
            for param in params:
                self.codec.begin(self._name[id(param)], param)
        self.buckets.append(bucket)

    def start_window(self) -> None:
        """Forget the last window's gradients."""
        self._filled.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.pending, bucket.work, bucket.launched = len(bucket.params), None, False
        if self.codec is not None:
            self.codec.memory.forget()
        for _, param in self.parameters:
            param.grad = None

    def start_backward(self, last: bool) -> None:
        """Before each backward; only the window's ``last`` one sends anything."""
        self._syncing = last
        self._seen.clear()

    def _on_gradient(self, param: Tensor) -> None:
        key = id(param)
        grad = param.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise ModelError(
                f"parameter {self._name[key]!r} has a sparse gradient, which cannot be summed over the ranks here; "
                "make its layer dense (nn.Embedding(..., sparse=False))"
            )
        bucket = self._bucket_of[key]
        if self._syncing and bucket.launched:
            raise ModelError(
                f"parameter {self._name[key]!r} received a gradient twice in one backward, after its bucket was "
                "sent: this happens with re-entrant activation checkpointing (use_reentrant=True) of shared blocks; "
                "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self._take(param, grad)
        if self._syncing and key not in self._seen:
            self._seen.add(key)
            bucket.pending -= 1
            self._launch_ready()

    def _take(self, param: Tensor, grad: Tensor) -> None:
        """The gradient's values lie in the bucket from now on."""
        view = self._view[id(param)]
        if not same_memory(grad, view):
            view.copy_(grad)
            param.grad = view
        self._filled.add(id(param))

    def _launch_ready(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        """Send the next bucket, and what follows of coded ones before it: on every rank in this order."""
        self._launch(self.buckets[self._next])
        for bucket in self.buckets[: self._next]:
            if bucket.coded:
                self._go_on(bucket)
        self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        bucket.launched = True
        for param in bucket.params:
            if id(param) not in self._filled:
                self._view[id(param)].zero_()
        if bucket.coded and self.codec is not None:
            bucket.more = self.codec.reduce(bucket.coded, bucket.flat, self.group)
            bucket.work = next(bucket.more)
        elif self.ranks > 1:
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def _go_on(self, bucket: _Bucket) -> None:
        """Wait for what is on its way, and send what follows it."""
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = next(bucket.more, None)

    def start_schedule(self) -> None:
        """Before a pipeline's schedule, which sends nothing."""

    def release(self) -> None:
        """After an evaluation, which leaves nothing here."""

    def gather(self) -> None:
        """Take in gradients that came about without a hook, as where a schedule works out weights' gradients apart."""
        for _, param in self.parameters:
            if param.grad is not None and id(param) not in self._filled:
                self._take(param, param.grad)

    def finish(self) -> None:
        """Collective. Send what backward did not complete and wait for all sums."""
        while self._next < len(self.buckets):
            self._launch_next()
        while any(bucket.work is not None for bucket in self.buckets):
            for bucket in self.buckets:
                self._go_on(bucket)
        self._syncing = False
        for name, param in self.parameters:
            if name in self.ties:
                dist.all_reduce(self._view[id(param)], group=self.ties[name].group)

    def used(self) -> list[float]:
        """1.0 for each parameter, in order, that received a gradient on this rank in this window."""
        return [1.0 if id(param) in self._filled else 0.0 for _, param in self.parameters]

    def squared_norm(self, dtype: torch.dtype | None) -> Tensor:
        """This rank's share of the squared norm (float64 scalar): summed over ranks it counts every gradient once.

        ``dtype``: accumulate in that type (float64 where float32 squares would overflow), None: the gradient's own.
        """
        rank = dist.get_rank(self.group)
        shares = [torch.zeros((), dtype=torch.float64, device=bucket.flat.device) for bucket in self.buckets[:1]]
        for bucket in (bucket for bucket in self.buckets if bucket.counts):
            size = bucket.flat.numel()
            share = bucket.flat[rank * size // self.ranks : (rank + 1) * size // self.ranks]
            shares.append(torch.linalg.vector_norm(share, dtype=dtype).double() ** 2)
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)

    def assign(self, used: Iterable[bool]) -> None:
        """Give every parameter used on any rank its summed gradient; the others get None, as on one device.

        What a codec left of the gradients that are used is kept for the next step."""
        taken = []
        for (name, param), is_used in zip(self.parameters, used, strict=True):
            param.grad = self._view[id(param)] if is_used else None
            taken += [name] if is_used else []
        if self.codec is not None:
            self.codec.memory.take_over(taken)

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def first_non_finite(self) -> str | None:
        """The name of the first parameter whose summed gradient has a NaN or an infinity."""
        for name, param in self.parameters:
            if not torch.isfinite(self._view[id(param)]).all():
                return name
        return None


def _laid_as(param: Tensor, part: Tensor) -> Tensor:
    """A view of ``part`` with the strides that autograd gives the gradient of ``param``.

    Fused optimizer kernels walk weight, gradient and state by address alone, so all must lie alike: those of a
    transposed or channels-last weight too. See torch/csrc/autograd/functions/accumulate_grad.h, "gradient layout".
    """
    return part.as_strided(param.shape, torch.empty_like(param, device="meta").stride(), part.storage_offset())


def _partition(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for param in reversed(params):
        same = buckets and (buckets[-1][0].dtype, buckets[-1][0].device) == (param.dtype, param.device)
        if not same or size >= limit:
            limit = bucket_bytes if buckets else limit
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets
