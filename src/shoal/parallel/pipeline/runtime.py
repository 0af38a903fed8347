"""Running a window through a pipeline: torch.distributed.pipelining's runtime over our action lists and live chunks.

A rank holds what is in flight and no more, whatever the window's length: a receive's buffer is made when it is posted
and let go with the micro-batch that it belongs to, and of what was sent the last few messages are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _PipelineScheduleRuntime, _wait_batch_p2p
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from shoal.parallel.pipeline.chunks import Call, Chunk
from shoal.plan.messages import UNDER_WAY, Entries, received_early, with_messages
from shoal.plan.schedule import Action, Overlap, action_lists, least_micro_batches, parts


class Sends:
    """Messages under way, the oldest first, each with what keeps it alive. (Whether one is through cannot be asked: of
    gloo's no word comes before it is awaited, and on a GPU the host is far ahead.)"""

    def __init__(self) -> None:
        self.under_way: deque[tuple[list[dist.Work], list[dist.P2POp]]] = deque()

    def start(self, ops: list[dist.P2POp]) -> None:
        """Send one message more, and await those that are too many."""
        self.under_way.append((_batch_p2p(ops), ops))
        self.finish(UNDER_WAY)

    def finish(self, left: int = 0) -> None:
        """Await all but the ``left`` last ones."""
        while len(self.under_way) > left:
            _wait_batch_p2p(self.under_way.popleft()[0])


class Stage(_PipelineStageBase):
    """A chunk in torch's runtime. The shapes that come in are known from the recording, per micro-batch, so that they
    may differ between micro-batches and nothing is sent to find them out."""

    def __init__(self, chunk: Chunk, stages: int, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(chunk, chunk.stage, stages, device, group)

    def expect(self, calls: Sequence[Call], has_backward: bool, sends: Sends) -> None:
        """Make ready for a window: what comes in and what comes back, of each micro-batch's own shapes."""
        self.chunks, self.calls, self.sends = len(calls), calls, sends
        self.has_backward = has_backward
        self.clear_runtime_states()
        self.grad_send_info = None
        self.args_recv_info = {
            number: tuple(
                _coming(call, value, self.stage_index - 1) for value in call.stages.crossing[self.stage_index]
            )
            for number, call in enumerate(calls)
        }
        stages = calls[0].stages
        leaving = () if self.is_last else stages.leaving(self.stage_index)
        self.act_send_info = {index: [self.stage_index + 1] for index in range(len(leaving))}
        values = stages.recording.values
        self._stage_meta.inputs = tuple(_meta(values[value]) for value in stages.crossing[self.stage_index])
        self._stage_meta.outputs = tuple(_meta(values[value]) for value in leaving)
        self._stage_meta.input_grads = tuple(m if m.requires_grad else None for m in self._stage_meta.inputs)
        self.grad_recv_info = {
            number: tuple(
                _coming(call, value, self.stage_index + 1, gradient=True)
                for value in (() if self.is_last else call.stages.leaving(self.stage_index))
            )
            for number, call in enumerate(calls)
        }

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        """Receives, each into a buffer that is made here."""
        for info in recv_infos:
            if info.tensor_meta is not None:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Gradients from the next stage on this rank, zeros where none came about."""
        grads = (
            torch.zeros(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
            if grad is None and info.tensor_meta is not None
            else grad
            for info, grad in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        )
        super().set_local_bwd_input(tuple(grads), mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """A forward. What came in is the micro-batch's from here on, and goes with it: at once where no backward
        follows."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _let_go(self.args_recv_info[fwd_chunk_id])
        if not self.has_backward:
            outputs, _ = self.fwd_cache.pop(fwd_chunk_id)
            if not self.is_last and self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
                self.fwd_cache[fwd_chunk_id] = outputs, []  # until it is sent
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """A backward, or its first half, which keeps the gradients that came back as long as its second needs them.
        Where nothing that came in needs a gradient (frozen stages before) the first is all of it: torch's halves meet
        at what lies between inputs and weights, and find no weight's gradient without an input's."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._whole, last_backward)
        _let_go(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """A backward's second half, where there are two."""
        if not self._whole:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @property
    def _whole(self) -> bool:
        """Whether no backward comes in halves. (Of the first stage torch works out all in the second.)"""
        return not self.is_first and not any(meta.requires_grad for meta in self._stage_meta.inputs or ())

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send dense copies: what is received has no strides. Nothing is left to the caller."""
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        dense = tuple(output.detach().contiguous() for output in outputs)
        self.fwd_cache[fwd_chunk_id] = (dense, inputs)
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (outputs, inputs)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        self.sends.start(ops)
        return []

    def _get_grad_send_meta(self, input_idx: int) -> Any:
        metas = self._stage_meta.input_grads
        return metas[input_idx] if metas else None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send dense gradients, zeros where none came about, of this micro-batch's own shapes. Nothing is left to the
        caller."""
        if not self.has_backward or self.is_first:
            return []
        call = self.calls[bwd_chunk_id]
        fakes = [call.stages.recording.values[value] for value in call.stages.crossing[self.stage_index]]
        grads = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(
            None if not fake.requires_grad
            else torch.zeros(fake.shape, dtype=fake.dtype, device=self.device) if grad is None
            else grad.contiguous()
            for fake, grad in zip(fakes, grads, strict=True)
        )  # fmt: skip
        self.sends.start(super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        """Nothing is left to infer: ``expect`` has made ready."""

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to infer."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first messages between neighbours, but none from a rank to itself (V schedules)."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[_RecvInfo, ...]:
        raise NotImplementedError  # made by ``expect``


def _coming(call: Call, value: int, source: int, gradient: bool = False) -> _RecvInfo:
    """What comes of a value from stage ``source``: no gradient of what needs none."""
    fake = call.stages.recording.values[value]
    return _RecvInfo(f"value {value}", source, None, None if gradient and not fake.requires_grad else _meta(fake))


def _let_go(infos: tuple[_RecvInfo, ...]) -> None:
    for info in infos:
        info.buffer = None


def _meta(fake: Tensor) -> _TensorMeta:
    shape = torch.Size(fake.shape)
    strides = torch.empty(shape, device="meta").stride()
    return _TensorMeta(shape=shape, stride=strides, dtype=fake.dtype, requires_grad=fake.requires_grad)


class Pipeline:
    """This rank's stages, and the schedules that run them. ``schedule``: a name of ``plan.schedule``."""

    def __init__(
        self, chunks: Sequence[Chunk], stages: int, schedule: str, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self.schedule, self.group, self.stage_count, self.device = schedule, group, stages, device
        self.ranks = dist.get_world_size(group)
        self.stages = [Stage(chunk, stages, device, group) for chunk in chunks]
        self._runtimes: dict[tuple[int, bool], _PipelineScheduleRuntime] = {}

    def least(self, micro_batches: int) -> int:
        """How many micro-batches the schedule takes at least, for a window of ``micro_batches``."""
        per_rank = self.stage_count // self.ranks
        needed = max(micro_batches, least_micro_batches(self.schedule, self.ranks, per_rank))
        if self.schedule.startswith("interleaved") and needed > self.ranks:
            rounds = needed // self.ranks
            needed = -(-needed // rounds) * rounds
        return needed

    def run(self, calls: Sequence[Call], backward: bool) -> None:
        """Every call's forward, and its backward where asked. Collective over the pipeline's ranks."""
        sends = Sends()
        for stage in self.stages:
            stage.expect(calls, backward, sends)
        runtime = self._runtime(len(calls), backward)
        failed = None
        try:
            runtime._step_microbatches(
                [()] * len(calls),
                [{"call": call} for call in calls],
                list(calls) if backward else None,
                return_outputs=False,
            )
        except RuntimeError as error:  # torch's own lists every argument, and hides what went wrong
            if (failed := error.__cause__) is None:
                raise
        if failed is not None:
            raise failed
        sends.finish()
        for stage in self.stages:
            stage.clear_runtime_states()

    def _runtime(self, count: int, backward: bool) -> _PipelineScheduleRuntime:
        key = (count, backward)
        if key not in self._runtimes:
            made = _PipelineScheduleRuntime(self.stages, count, loss_fn=_loss if backward else None, scale_grads=False)
            lists = self._lists(count, backward)
            made.stage_index_to_group_rank = {a.stage: rank for rank, of in enumerate(lists) for a in _flat(of)}
            made.pipeline_order_with_comms = {
                rank: [action for entry in self._posted(entries) if (action := _Action.from_str(str(entry)))]
                for rank, entries in enumerate(with_messages(lists))
            }
            self._runtimes[key] = made
        runtime = self._runtimes[key]
        for stage in self.stages:
            stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
        return runtime

    def _posted(self, entries: Entries) -> Entries:
        """A list with its receives where they are posted on this device."""
        return received_early(entries) if self.device.type == "cpu" else entries

    def _lists(self, count: int, backward: bool) -> list[list[Action | Overlap]]:
        per_rank = self.stage_count // self.ranks
        if backward:
            return action_lists(self.schedule, self.ranks, per_rank, count)
        placed = action_lists(self.schedule, self.ranks, per_rank, self.least(count))
        mine = [sorted({a.stage for a in _flat(actions)}) for actions in placed]
        return [[Action(stage, "F", micro) for micro in range(count) for stage in stages] for stages in mine]


def _flat(actions: Sequence[Action | Overlap]) -> list[Action]:
    return [part for action in actions for part in parts(action)]


def _loss(output: tuple[Tensor, ...], target: Any) -> Tensor:
    """The last chunk has worked out the loss already."""
    return output[0]
