"""Faults that show in nothing but the numbers: layouts, names that depend on samples, states that JSON changes."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Given, Rows, classes_loss, error, job, mlp, mlp_rows, sgd, stack, start, weights
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from shoal import Loss
from shoal.checkpoint.reader import Reader, newest_good
from shoal.core.errors import ConfigError, DataError, ModelError, NumericsError
from shoal.engine.lr_schedule import warmup_cosine

pytestmark = pytest.mark.ranks


class Turned(nn.Module):
    """A transposed weight and a channels-last convolution."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(4, 8) * 0.3).t())
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        return x @ self.weight + self.conv(x.view(-1, 2, 2, 2)).flatten(1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_weights_of_any_memory_layout_train_as_in_one_process_also_when_resumed(tmp_path, kind):
    rows = mlp_rows(16)
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = lambda model: kind(model.parameters(), lr=0.05, **more)  # noqa: E731

    def body(rank):
        ids, before = [], None
        for steps in (3, 6):
            run = start(
                job(model=Turned, data=rows, loss=classes_loss, optimizer=optimizer),
                tmp_path, global_batch=8, micro_batch=4, steps=steps, epochs=3, resume=True,
            )  # fmt: skip
            before = before or weights(run.model)
            for window in run.windows():
                run.step(window)
                ids.append([i for micro in window.micro_batches for i in micro.ids])
            run.save()
            run.close()
        model = Turned()
        model.load_state_dict(before)
        plain = optimizer(model)
        for chosen in ids:
            plain.zero_grad()
            loss = classes_loss(model(stack(rows, chosen)[0]), stack(rows, chosen)[1])
            (loss.sum / loss.count).backward()
            plain.step()
        return error(weights(run.model), weights(model))

    assert run_ranks(body, 1)[0] < 1e-4


def by_class(output, targets):
    """Figures of the classes that the batch has."""
    return {f"class{int(c)}": Loss((targets == c).sum() * 10 * (c + 1), (targets == c).sum()) for c in targets.unique()}


def test_figures_that_only_some_ranks_have_are_not_mixed_up(tmp_path):
    rows = Rows([(torch.ones(8), torch.tensor(c)) for c in range(4)])

    def body(rank):
        made = job(model=mlp, data=rows, eval_data=rows, loss=classes_loss, metrics=by_class)
        return start(made, tmp_path, global_batch=4, steps=1).evaluate()

    for found in run_ranks(body, 2):
        assert {name: found[name] for name in found if name != "loss"} == {
            f"class{c}": 10.0 * (c + 1) for c in range(4)
        }


def test_terms_whose_names_depend_on_the_samples_are_refused(tmp_path):
    def counts(inputs, targets):
        return {"all": len(targets), "b" if 1 in targets else "c": 1}

    def body(rank):
        run = start(job(model=mlp, data=mlp_rows(16), loss=classes_loss, counts=counts), tmp_path, global_batch=2)
        with pytest.raises(NumericsError, match="counts.. told the terms all, . and, for another micro-batch, all, ."):
            for window in run.windows():
                with pytest.raises(NumericsError) as refused:
                    run.step(window)
                if "another micro-batch" in str(refused.value):
                    raise refused.value

    run_ranks(body, 1)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 4]),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1, 2])], [3]
        ),
    ],
)
def test_a_schedule_with_milestones_goes_on_after_a_resume(tmp_path, schedule):
    def body(rank):
        def rates(out, steps):
            made = job(model=mlp, data=mlp_rows(32), loss=classes_loss, lr_schedule=lambda opt, steps: schedule(opt))
            run = start(made, tmp_path / out, global_batch=4, steps=steps, resume=True)
            found = [run.step(window).lr for window in run.windows()]
            run.save()
            run.close()
            return found

        return rates("whole", 7), rates("parts", 2) + rates("parts", 7)

    whole, parts = run_ranks(body, 1)[0]
    assert whole == parts and len(set(whole)) > 2


def test_a_schedule_whose_state_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    def schedule(optimizer, steps):
        made = lr_scheduler.StepLR(optimizer, 1)
        made.table = torch.zeros(2)
        return made

    def body(rank):
        with pytest.raises(ConfigError, match="the state of StepLR cannot be saved as JSON"):
            start(job(model=mlp, data=mlp_rows(8), loss=classes_loss, lr_schedule=schedule), tmp_path, global_batch=4)

    run_ranks(body, 1)


def test_an_unfrozen_parameter_is_refused_and_one_frozen_for_a_while_is_not(tmp_path):
    def body(rank):
        def frozen():
            model = mlp()
            model[0].requires_grad_(False)
            return model

        run = start(job(model=frozen, data=mlp_rows(32), loss=classes_loss), tmp_path / "late", global_batch=8)
        run.model[0].requires_grad_(True)
        with pytest.raises(ModelError, match=r"'0.weight' requires a gradient, but was frozen when the run was made"):
            run.step(next(run.windows()))
        run = start(job(model=mlp, data=mlp_rows(32), loss=classes_loss, optimizer=sgd(0.1)), tmp_path, global_batch=8)
        run.model[0].requires_grad_(False)
        sums = []
        for number, window in enumerate(run.windows()):
            if number == 2:
                run.model[0].requires_grad_(True)
            run.step(window)
            sums.append(float(run.model[0].weight.detach().double().sum()))
        return sums

    first, second = run_ranks(body, 2)
    assert first == second and first[0] == first[1] != first[2]


class Features(nn.Module):
    """A buffer with a randomness of its own, other on each rank, beside weights that are the same."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        generator = torch.Generator()
        generator.seed()
        self.register_buffer("features", torch.randn(8, 8, generator=generator))

    def forward(self, x):
        return self.linear(x @ self.features)


def test_buffers_and_averages_begin_equal_on_all_ranks(tmp_path):
    def body(rank):
        run = start(job(model=Features, data=mlp_rows(8), loss=classes_loss), tmp_path / "b", global_batch=8)

        def own():
            torch.manual_seed(rank)
            return mlp().to(memory_format=torch.preserve_format)

        other = start(job(model=own, data=mlp_rows(8), loss=classes_loss), tmp_path / "a", global_batch=8, ema=0.9)
        return run.model.features.clone(), other.average.tensors()

    (features, first), (others, second) = run_ranks(body, 2)
    assert torch.equal(features, others) and all(torch.equal(first[name], second[name]) for name in first)


def test_fitting_the_first_fp16_scale_leaves_batch_statistics_alone(tmp_path):
    def body(rank):
        model = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # noqa: E731
        run = start(
            job(model=model, data=mlp_rows(8), loss=classes_loss), tmp_path, global_batch=8, steps=1, precision="fp16"
        )
        run.step(next(run.windows()))
        return int(run.model[1].num_batches_tracked)

    assert run_ranks(body, 1) == [1]


def test_evaluation_leaves_modes_and_weights_and_waits_with_a_save(tmp_path):
    def body(rank):
        held = []

        def metrics(output, targets):
            held[0].save()
            return {}

        made = job(
            model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), data=mlp_rows(16),
            eval_data=mlp_rows(8), loss=classes_loss, metrics=metrics, optimizer=sgd(0.1),
        )  # fmt: skip
        held.append(start(made, tmp_path, global_batch=8, ema=0.5))
        (run,) = held
        for window in run.windows():
            run.step(window)
        run.model[1].eval()
        run.evaluate()
        saved = Reader(newest_good(tmp_path / "checkpoints")[0].path).read("model/0.weight")
        return run.model.training, run.model[1].training, torch.equal(saved, run.model[0].weight)

    assert run_ranks(body, 1) == [(True, False, True)]


class Halves(Given):
    def data(self):
        return random_split(mlp_rows(40), [30, 10])[0]

    def eval_data(self):
        return random_split(mlp_rows(40), [30, 10])[1]


def test_a_random_split_made_in_data_and_in_eval_data_is_one_split(tmp_path):
    def body(rank):
        made = Halves()
        made._given = {"model": mlp, "loss": classes_loss, "optimizer": sgd(0.1)}
        run = start(made, tmp_path, global_batch=6, steps=1)
        run.step(next(run.windows()))
        held_out, given = [], run.evaluate
        made.__class__ = type(
            "Spy", (Halves,), {"eval_data": lambda self: held_out.append(Halves.eval_data(self)) or held_out[-1]}
        )
        given()
        given()
        return run.windows_source._reader._dataset.indices, [part.indices for part in held_out]

    found = run_ranks(body, 2)
    assert found[0] == found[1]
    train, (first, second) = found[0]
    assert first == second and not set(train) & set(first)


class Own(nn.BatchNorm1d):
    """No forward of its own."""


class Other(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def test_subclasses_of_batchnorm_see_all_ranks_or_are_refused(tmp_path):
    def train(ranks, kind):
        def body(rank):
            model = lambda: nn.Sequential(nn.Linear(8, 8), kind(8), nn.Linear(8, 4))  # noqa: E731
            out = tmp_path / f"{ranks}{kind.__name__}"
            run = start(
                job(model=model, data=mlp_rows(32), loss=classes_loss, optimizer=sgd(0.1)), out, global_batch=8,
                precision="fp64",
            )  # fmt: skip
            for window in run.windows():
                run.step(window)
            return weights(run.model)

        return run_ranks(body, ranks)[0]

    assert error(train(2, Own), train(1, Own)) < 1e-10

    def refused(rank):
        with pytest.raises(ModelError, match="'1' is a Other, a BatchNorm with a forward of its own"):
            model = lambda: nn.Sequential(nn.Linear(8, 8), Other(8))  # noqa: E731
            start(job(model=model, data=mlp_rows(8), loss=classes_loss), tmp_path / "other", global_batch=8)

    run_ranks(refused, 2)


class Cache(nn.Module):
    """A table that grows with the largest number seen, as rotary embeddings keep one."""

    def __init__(self, persistent=False):
        super().__init__()
        self.linear, self.persistent = nn.Linear(8, 4), persistent
        self.register_buffer("table", torch.zeros(1), persistent=persistent)

    def forward(self, x):
        size = int(x.abs().max() * 100)
        if size > len(self.table):
            self.register_buffer("table", torch.arange(size).float(), persistent=self.persistent)
        assert torch.equal(self.table[1:], torch.arange(len(self.table)).float()[1:])
        return self.linear(x) + 0 * self.table[-1]


def test_a_cache_that_differs_between_ranks_stays_each_ranks_own(tmp_path):
    def body(rank):
        run = start(job(model=Cache, data=mlp_rows(32), loss=classes_loss), tmp_path / "a", global_batch=8)
        for window in run.windows():
            run.step(window)
        run = start(
            job(model=lambda: Cache(True), data=mlp_rows(32), loss=classes_loss), tmp_path / "b", global_batch=8
        )
        with pytest.raises(ModelError, match="forward gave the buffer 'table' the shape"):
            run.step(next(run.windows()))

    run_ranks(body, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(mlp_rows(40).samples)


def test_a_schedule_over_an_unknown_number_of_steps_is_refused(tmp_path):
    def body(rank):
        for schedule in (
            lambda optimizer, steps: warmup_cosine(steps),
            lambda optimizer, steps: lambda step: 1 - step / steps,
        ):
            with pytest.raises(ConfigError, match="asks for the number of steps, but this iterable data"):
                made = job(model=mlp, data=Stream(), loss=classes_loss, lr_schedule=schedule)
                start(made, tmp_path, global_batch=8)

    run_ranks(body, 1)


def test_what_the_data_is_not_is_said(tmp_path):
    def body(rank):
        notes = []
        once = job(model=mlp, data=iter(mlp_rows(16).samples), loss=classes_loss)
        run = start(once, tmp_path / "once", notes.append, global_batch=8, steps=9)
        assert len([run.step(window) for window in run.windows()]) == 2
        assert any("the data ended after step 2 of 9: it can be read once only" in note for note in notes)
        with pytest.raises(DataError, match="the data is a DataLoader, whose items are batches already"):
            data = DataLoader(TensorDataset(torch.zeros(8, 8), torch.zeros(8)))
            start(job(model=mlp, data=data, loss=classes_loss), tmp_path / "loader", global_batch=2)
        run = start(
            job(model=mlp, data=Rows([torch.zeros(8)] * 4), loss=classes_loss), tmp_path / "one", global_batch=2
        )
        with pytest.raises(DataError, match="should be a pair .inputs, targets., found a Tensor"):
            run.step(next(run.windows()))

    run_ranks(body, 1)


def test_a_resume_over_data_of_another_size_is_told(tmp_path):
    def body(rank):
        for rows, said in ((32, False), (64, True)):
            notes = []
            made = job(model=mlp, data=mlp_rows(rows), loss=classes_loss)
            run = start(made, tmp_path, notes.append, global_batch=8, steps=2, resume=True)
            for window in run.windows():
                run.step(window)
            run.save()
            run.close()
            assert ("the data was 32 samples and is now 64 samples" in " ".join(notes)) == said
            assert run.last_loss is not None

    run_ranks(body, 1)


def test_models_that_cannot_be_summed_are_refused_by_name(tmp_path):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4, sparse=True)

        def forward(self, x):
            return self.table(x[:, 0].long().clamp(0, 3))

    def body(rank):
        run = start(job(model=Sparse, data=mlp_rows(8), loss=classes_loss), tmp_path / "a", global_batch=8)
        with pytest.raises(ModelError, match=r"'table.weight' has a sparse gradient"):
            run.step(next(run.windows()))
        with pytest.raises(ModelError, match=r"parameter 'weight' has no shape yet"):
            start(job(model=lambda: nn.LazyLinear(4), data=mlp_rows(8), loss=classes_loss), tmp_path / "b")

    run_ranks(body, 1)
