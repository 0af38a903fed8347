"""Counts of one rank's run on fake tensors: bytes alive by what they are, collectives by group, FLOPs."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from shoal.blueprint.grouped import formula

#: Attention's kernels on the CPU, which torch's registry lacks.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}
CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "buffers", "inputs")
#: Whose code asks for memory (file and functions, none: all), and what that memory then is; else it is activations.
MAKERS = (
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", (), "gathered"),
    ("torch/distributed/fsdp/_fully_shard/", (), "buffers"),
    ("shoal/parallel/pipeline/runtime.py", ("_get_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"), "buffers"),
    ("shoal/parallel/replicate/buckets.py", (), "gradients"),
    ("shoal/compress/", (), "buffers"),
)
NAMES = {
    "allreduce_": "all_reduce", "all_reduce_": "all_reduce", "_allgather_base_": "all_gather",
    "allgather_": "all_gather", "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "recv_": "recv", "broadcast_": "broadcast",
    "all_to_all_single": "all_to_all", "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
}  # fmt: skip


class Collective(NamedTuple):
    """A collective of one kind in one group; ``ranks``: the group's."""

    kind: str
    ranks: tuple[int, ...]
    phase: str


@dataclass
class Sums:
    """Calls and bytes of the whole buffers (what all ranks of the group hold together, of a gather or scatter)."""

    count: int = 0
    bytes: int = 0


@dataclass
class _Piece:
    """A storage that is alive."""

    bytes: int
    category: str
    ref: Any
    phase: str


class Counting(TorchDispatchMode):
    """Counts while it is on. Storages are told apart by identity; one that is resized counts as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, _Piece] = {}
        self.now = Counter[str]()
        self.total = self.peak = 0
        self.at_peak: Mapping[str, int] = {}
        self.peak_phase = self.phase = ""
        self.collectives: dict[Collective, Sums] = {}
        self.flops = 0

    def begin(self) -> None:
        """Forget what was counted, but for what is alive."""
        self.peak, self.at_peak, self.flops, self.collectives = 0, {}, 0, {}

    def enter(self, phase: str) -> None:
        """Another phase of the step."""
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # seen again as operations on what this rank holds
        with torch._C.DisableTorchFunctionSubclass():  # a tensor rank's parts answer Python code with whole shapes
            return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._count_flops(func, args, kwargs, result)
        if func in collective_ops and func not in sync_ops:
            self._count_collective(func, args, kwargs, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and not tensor.is_meta:  # meta: what other stages hold
                self.see(tensor)
        return result

    def _count_flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        counted = formula(func) or CPU_ATTENTION.get(func._overloadpacket)
        if counted is not None:
            self.flops += counted(*args, **kwargs, out_val=result)

    def _count_collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        group = CollectiveOp.get_process_group(func, args)
        name: str = func._schema.name.partition("::")[2]
        key = Collective(NAMES.get(name) or name, tuple(dist.get_process_group_ranks(group)), self.phase)
        sums = self.collectives.setdefault(key, Sums())
        sums.count += 1
        sums.bytes += _bytes(args, result)

    def see(self, tensor: Tensor, category: str | None = None) -> None:
        """Count a tensor's storage, once, as ``category``, or by who asks for it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        piece = self.alive.get(key)
        if piece is not None:
            if category is not None and piece.category != category:
                self._add(piece.category, -piece.bytes)
                piece.category = category
                self._add(category, piece.bytes)
            return
        category = category or self._maker()
        piece = _Piece(storage.nbytes(), category, weakref.ref(storage, lambda _: self._gone(key)), self.phase)
        self.alive[key] = piece
        self._add(category, piece.bytes)

    def _maker(self) -> str:
        if self.phase == "optimizer":
            return "optimizer"
        frame = sys._getframe(4)
        while frame is not None:
            file = frame.f_code.co_filename
            for part, functions, category in MAKERS:
                if part in file and (not functions or frame.f_code.co_name in functions):
                    return category
            if "/shoal/engine/" in file:
                return "activations"
            frame = frame.f_back
        return "activations"

    def _gone(self, key: int) -> None:
        piece = self.alive.pop(key, None)
        if piece is not None:
            self._add(piece.category, -piece.bytes)

    def _add(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.at_peak, self.peak_phase = self.total, dict(self.now), self.phase

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that has another size now."""
        piece = self.alive.get(storage._cdata)
        if piece is not None:
            before, piece.bytes = piece.bytes, storage.nbytes()
            self._add(piece.category, piece.bytes - before)

    @contextmanager
    def objects(self) -> Iterator[None]:
        """Python objects are exchanged for real while this holds: every rank has this one's."""
        original = dist.all_gather_object

        def gather(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                original(*args, **kwargs)

        dist.all_gather_object = gather
        try:
            yield
        finally:
            dist.all_gather_object = original

    @contextmanager
    def generators(self) -> Iterator[None]:
        """A generator's state, which recomputing keeps of each block, comes of no operation: it is seen while this
        holds."""
        original = torch.get_rng_state

        def state() -> Tensor:
            with _disable_current_modes():
                found = original()
            self.see(found, "activations")
            return found

        torch.get_rng_state = state
        try:
            yield
        finally:
            torch.get_rng_state = original

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """FSDP frees and takes memory by resizing storages, which is no operation: it is seen while this holds."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def _bytes(args: Any, result: Any) -> int:
    """Of the buffer that a collective is about, whole."""
    return max(
        sum(t.numel() * t.element_size() for t in tree_leaves(each) if isinstance(t, Tensor))
        for each in (*args[:2], result)
    )
