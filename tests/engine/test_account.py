"""What a step reports: global, once per optimizer step, everything counted under its own name."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import IGNORED, LM, Rows, Scalar, job, sgd, start, token_loss, token_rows

from shoal import Loss
from shoal.core.errors import RankMismatch
from shoal.engine import clock
from shoal.engine.loop import train_loop
from shoal.monitor.events import read_events
from shoal.monitor.summary import summary

pytestmark = pytest.mark.ranks


def pairs(values):
    return Rows([(torch.tensor(float(total)), torch.tensor(float(count))) for total, count in values])


def given_count(output, counts):
    return Loss(output.sum(), counts.sum())


def step_rows(out, rank=0):
    return list(read_events(out, rank, "step"))


def drive(made, out, **settings):
    run = start(made, out, **settings)
    for window in run.windows():
        run.step(window)
    run.close()
    return run


def test_the_logged_loss_is_the_global_mean(tmp_path):
    """The logged loss was rank 0's own.

    https://github.com/snowflakedb/ArcticTraining/issues/62 https://github.com/KellerJordan/modded-nanogpt/issues/2
    """

    def body(rank):
        made = job(model=Scalar, data=pairs([(6, 3), (10, 1)]), loss=given_count, optimizer=sgd(0.0))
        drive(made, tmp_path, steps=1, global_batch=2)

    run_ranks(body, 2)
    for rank in (0, 1):
        assert [row["loss"] for row in step_rows(tmp_path, rank)] == [4.0]


def test_one_loss_per_optimizer_step_the_windows_mean(tmp_path):
    """The logged loss was the last micro-batch's, or several values came for one step.

    https://github.com/karpathy/nanochat/pull/52 https://github.com/Lightning-AI/pytorch-lightning/issues/5306
    """

    def body(rank):
        data = pairs([(4, 1), (1, 1), (8, 1), (2, 1)])
        made = job(model=Scalar, data=data, loss=given_count, optimizer=sgd(0.0))
        drive(made, tmp_path, steps=1, global_batch=4, micro_batch=1)

    run_ranks(body, 1)
    assert [(row["step"], row["loss"]) for row in step_rows(tmp_path)] == [(1, 3.75)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_real_padded_and_loss_tokens_have_names_of_their_own(tmp_path, ranks):
    """Padding or masked tokens were counted, or not, without saying so.

    https://github.com/meta-pytorch/torchtune/issues/2296 https://github.com/awslabs/sockeye/issues/1073
    """
    samples = []
    for length in (12, 5, 9, 2):
        tokens, targets = token_rows([12], seed=length)[0]
        mask = (torch.arange(12) < length).long()
        samples.append(({"tokens": tokens * mask, "attention_mask": mask}, targets.where(mask.bool(), IGNORED)))
        samples[-1][1][0] = IGNORED  # the prompt

    class Masked(LM):
        def forward(self, tokens, attention_mask):
            return super().forward(tokens)

    def body(rank):
        made = job(model=Masked, data=Rows(samples), loss=token_loss)
        drive(made, tmp_path, steps=1, global_batch=4, micro_batch=1)

    run_ranks(body, ranks)
    (row,) = step_rows(tmp_path)
    assert (row["padded_tokens"], row["tokens"], row["count"], row["samples"]) == (48, 28, 24, 4)


def test_the_summary_names_padding_and_a_job_that_hides_its_padding_is_told(tmp_path):
    """https://github.com/meta-pytorch/torchtune/issues/2296 https://github.com/awslabs/sockeye/issues/1073"""

    class Masked(LM):
        def forward(self, tokens, attention_mask):
            return super().forward(tokens)

    def collate(samples):
        tokens = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        mask = torch.zeros_like(tokens)
        for row, (x, _) in zip(mask, samples, strict=True):
            row[: len(x)] = 1
        targets = torch.nn.utils.rnn.pad_sequence([y for _, y in samples], batch_first=True, padding_value=IGNORED)
        return {"tokens": tokens, "attention_mask": mask}, targets

    samples = [(x[:length], y[:length]) for length in (12, 5, 9, 2) for x, y in [token_rows([12], seed=length)[0]]]

    def body(rank, masked):
        made = job(
            model=Masked if masked else LM, data=Rows(samples), loss=token_loss,
            collate=collate if masked else lambda rows: (collate(rows)[0]["tokens"], collate(rows)[1]),
        )  # fmt: skip
        run = start(made, tmp_path / str(masked), steps=2, global_batch=4)
        found = train_loop(run)
        run.close()
        return summary(found)

    (said,) = run_ranks(lambda rank: body(rank, True), 1)
    assert "  56 tokens; 96 with padding (42% of it padding)" in said
    (said,) = run_ranks(lambda rank: body(rank, False), 1)
    assert "with padding" not in said
    notes = {
        masked: [
            row["text"] for row in read_events(tmp_path / str(masked), 0, "note") if "counts as tokens" in row["text"]
        ]
        for masked in (True, False)
    }
    assert notes == {
        True: [],
        False: ["padding, if collate() adds any, counts as tokens: the inputs have no attention_mask"],
    }


def test_the_rate_counts_every_micro_batchs_tokens(tmp_path):
    """With accumulation only the last micro-batch's tokens entered the rate.

    https://github.com/NousResearch/torchtitan/pull/12
    """

    def body(rank):
        laps = clock.Laps.seconds
        clock.Laps.seconds = lambda self: {**dict.fromkeys(laps(self), 0.0), "step_s": 2.0}
        made = job(model=LM, data=token_rows([12] * 16), loss=token_loss)
        run = drive(made, tmp_path, steps=4, global_batch=8, micro_batch=2 // run_size())
        return run.record.totals.tokens_per_s, run.record.totals.samples_per_s

    for ranks in (1, 2):
        for tokens, samples in run_ranks(body, ranks):
            assert tokens == 48.0
            assert samples == 4.0
        for path in (tmp_path / "events").iterdir():
            path.unlink()
        (tmp_path / "run.json").unlink()


def run_size():
    return torch.distributed.get_world_size()


def test_times_of_a_step_add_up_to_the_whole(tmp_path):
    """Phases neither overlap nor leave a gap."""

    def body(rank):
        drive(job(model=LM, data=token_rows([12] * 16), loss=token_loss), tmp_path, steps=4, global_batch=8)

    run_ranks(body, 2)
    for row in step_rows(tmp_path):
        parts = [row[f"{name}_s"] for name in clock.PHASES]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(row["step_s"], rel=1e-9)
        assert row["forward_backward_s"] > 0


def test_a_phase_is_the_time_to_the_next_mark_and_pauses_count_for_nothing():
    """Evaluations between two steps are in neither."""
    watch = clock.Clock(torch.device("cpu"))
    times = iter([0.0, 1.0, 3.0, 10.0, 14.0, 14.5])
    watch._now = lambda: next(times)
    for phase in ("data_wait", "optimizer", "paused", "other", "optimizer"):
        watch.lap(phase)
    found = watch.close().seconds()
    assert found["step_s"] == 1 + 2 + 4 + 0.5
    assert (found["data_wait_s"], found["optimizer_s"], found["other_s"]) == (1.0, 2.5, 4.0)
    assert watch.close() is None


def test_a_save_on_one_rank_only_is_seen_and_named(tmp_path):
    """Saving behind 'if rank 0' hung, since gathering needs all ranks.

    https://github.com/pytorch/pytorch/issues/77562 https://github.com/huggingface/accelerate/issues/2000
    """

    def body(rank):
        run = start(job(model=LM, data=token_rows([12] * 16), loss=token_loss), tmp_path, steps=4, global_batch=8)
        try:
            for window in run.windows():
                run.step(window)
                if rank == 0:
                    run.save()
        except RankMismatch as error:
            return str(error)
        return ""

    for text in run_ranks(body, 2, timeout_s=30):
        assert "run.save() was called on some ranks only" in text
        assert "on every rank" in text


def test_ranks_decide_from_one_shared_loss(tmp_path):
    """Ranks disagreed on 'best so far', since only one had the reduced loss.

    https://github.com/EleutherAI/bergson/pull/380
    """

    def body(rank):
        data = pairs([(1, 1), (3, 1)])
        made = job(model=Scalar, data=data, eval_data=data, loss=given_count, optimizer=sgd(0.0))
        run = start(made, tmp_path, steps=1, global_batch=2)
        reports = [run.step(window).loss for window in run.windows()]
        found = run.evaluate()
        run.close()
        return reports, found["loss"]

    assert run_ranks(body, 2) == [([2.0], 2.0)] * 2
