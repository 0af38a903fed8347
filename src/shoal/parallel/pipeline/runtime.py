"""Running a window through a pipeline: torch.distributed.pipelining's runtime over our action lists and live chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.schedules import RECV_B, RECV_F, _Action, _add_send_recv, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from shoal.parallel.pipeline.chunks import Call, Chunk
from shoal.plan.schedule import Action, Overlap, action_lists, least_micro_batches


class Stage(_PipelineStageBase):
    """A chunk in torch's runtime. The shapes that come in are known from the recording, per micro-batch, so that they
    may differ between micro-batches and nothing is sent to find them out."""

    def __init__(self, chunk: Chunk, stages: int, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(chunk, chunk.stage, stages, device, group)

    def expect(self, calls: Sequence[Call], has_backward: bool) -> None:
        """Make ready for a window: a buffer for each value that comes in, and for each gradient that comes back."""
        self.chunks = len(calls)
        self.has_backward = has_backward
        self.clear_runtime_states()
        self.grad_send_info = None
        self.args_recv_info = {
            number: tuple(
                self._buffer(call, value, self.stage_index - 1) for value in call.stages.crossing[self.stage_index]
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
                self._buffer(call, value, self.stage_index + 1, gradient=True)
                for value in (() if self.is_last else call.stages.leaving(self.stage_index))
            )
            for number, call in enumerate(calls)
        }
        self.calls = calls

    def _buffer(self, call: Call, value: int, source: int, gradient: bool = False) -> _RecvInfo:
        fake = call.stages.recording.values[value]
        if gradient and not fake.requires_grad:
            return _RecvInfo(f"value {value}", source, None, None)
        buffer = torch.empty(fake.shape, dtype=fake.dtype, device=self.device)
        return _RecvInfo(f"value {value}", source, buffer, _meta(fake))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of dense copies: what is received has no strides."""
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        dense = tuple(output.detach().contiguous() for output in outputs)
        self.fwd_cache[fwd_chunk_id] = (dense, inputs)
        try:
            return super().get_fwd_send_ops(fwd_chunk_id)
        finally:
            self.fwd_cache[fwd_chunk_id] = (outputs, inputs)

    def _get_grad_send_meta(self, input_idx: int) -> Any:
        metas = self._stage_meta.input_grads
        return metas[input_idx] if metas else None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of dense gradients, zeros where none came about; of this micro-batch's own shapes."""
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
        return super().get_bwd_send_ops(bwd_chunk_id)

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
        for stage in self.stages:
            stage.expect(calls, backward)
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
        for stage in self.stages:
            stage.clear_runtime_states()

    def _runtime(self, count: int, backward: bool) -> _PipelineScheduleRuntime:
        key = (count, backward)
        if key not in self._runtimes:
            made = _PipelineScheduleRuntime(self.stages, count, loss_fn=_loss if backward else None, scale_grads=False)
            ours = dict(enumerate(self._lists(count, backward)))
            lists: dict[int, list[Any]] = {r: [_Action.from_str(str(a)) for a in of] for r, of in ours.items()}
            if backward:
                made._prepare_schedule_with_comms(lists)
            else:  # torch's check of a list wants backwards in it
                made.stage_index_to_group_rank = {a.stage: rank for rank, of in ours.items() for a in _flat(of)}
                made.pipeline_order_with_comms = _add_send_recv(
                    lists, made.stage_index_to_group_rank.__getitem__, self.stage_count
                )
            if self.device.type == "cpu":
                made.pipeline_order_with_comms = {
                    rank: _received_first(actions) for rank, actions in made.pipeline_order_with_comms.items()
                }
            self._runtimes[key] = made
        runtime = self._runtimes[key]
        for stage in self.stages:
            stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
        return runtime

    def _lists(self, count: int, backward: bool) -> list[list[Action | Overlap]]:
        per_rank = self.stage_count // self.ranks
        if backward:
            return action_lists(self.schedule, self.ranks, per_rank, count)
        placed = action_lists(self.schedule, self.ranks, per_rank, self.least(count))
        mine = [sorted({a.stage for a in _flat(actions)}) for actions in placed]
        return [[Action(stage, "F", micro) for micro in range(count) for stage in stages] for stages in mine]


def _received_first(actions: Sequence[_Action]) -> list[_Action]:
    """All receives, in their order, before the rest.

    Gloo sends once the receiver has said that it is ready, in the stream in which it sends itself: behind a forward's
    values on a slow link, so that gradients would only start to come back when these have gone. The buffers are there
    anyway. (NCCL runs what goes between two ranks in turn: a receive that is posted early would hold up the sends.)
    """
    return sorted(actions, key=lambda action: action.computation_type not in (RECV_F, RECV_B))  # keeps their order


def _flat(actions: Sequence[Action | Overlap]) -> list[Action]:
    return [part for action in actions for part in (action if isinstance(action, Overlap) else (action,))]


def _loss(output: tuple[Tensor, ...], target: Any) -> Tensor:
    """The last chunk has worked out the loss already."""
    return output[0]
