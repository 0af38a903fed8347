"""A pipeline holds what is in flight, however many micro-batches a step has."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Rows, job, sgd, start

from memory_runs import Case, every_token, language, measured

MICRO_BATCH, TOKENS, WIDTH = 2, 64, 64
MESSAGE = MICRO_BATCH * TOKENS * WIDTH * 4  # bytes of what goes from one stage to the next
INPUTS = 2 * MICRO_BATCH * TOKENS * 8  # bytes of a micro-batch's inputs and targets
FEW, MANY = 14, 32  # micro-batches; fewer do not fill what is received ahead beside what is sent (plan/flight.py)


def rows(number):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(128, (2, TOKENS), generator=generator)) for _ in range(number)]


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_live_bytes_do_not_grow_with_the_micro_batches(tmp_path, schedule, chunks):
    """A buffer for every micro-batch's values and gradients, and all that was sent until the step's end: 132 GiB of a
    70-billion-parameter model's 278 on 64 devices with 256 micro-batches."""

    def peaks(micro_batches):
        case = Case(language, rows(MICRO_BATCH * micro_batches), every_token)
        found = measured(
            case, tmp_path / str(micro_batches), 2, steps=2, mesh="pipeline=2", schedule=schedule, chunks=chunks,
            micro_batch=MICRO_BATCH, global_batch=MICRO_BATCH * micro_batches,
        )  # fmt: skip
        return [each.peak - 2 * micro_batches * INPUTS for each in found]  # this window's and the next one's

    for few, many in zip(peaks(FEW), peaks(MANY), strict=True):
        assert many - few < MESSAGE, (few, many)


@pytest.mark.ranks
def test_an_evaluation_lets_go_of_each_micro_batch(tmp_path):
    """No backward comes to take up what a forward left."""

    def rank(_):
        made = job(model=language, data=Rows(rows(4)), eval_data=Rows(rows(64)), loss=every_token, optimizer=sgd(0.1))
        run = start(
            made, tmp_path, steps=1, mesh="pipeline=2", schedule="interleaved-1f1b", chunks=2, micro_batch=2,
            global_batch=4,
        )  # fmt: skip
        held = []
        for stage in run.forwards.pipeline.stages:
            forward = stage.forward_one_chunk

            def counted(number, *args, stage=stage, forward=forward, **kwargs):
                output = forward(number, *args, **kwargs)
                buffers = [info.buffer for infos in stage.args_recv_info.values() for info in infos]
                held.append((len(stage.fwd_cache), sum(buffer is not None for buffer in buffers)))
                return output

            stage.forward_one_chunk = counted
        run.evaluate()
        run.close()
        return held

    for held in run_ranks(rank, 2):
        assert held and max(cached for cached, _ in held) <= 1 and max(buffers for _, buffers in held) <= 8, held
