"""A rank's part of the model has the first weights of model(), and nothing more of it is held on the way."""

from __future__ import annotations

import json
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.harness import run_ranks
from tests.small_jobs import Rows, job, start
from tests.starting import SLACK_BYTES, bytes_of, compare, largest_weight, share_of, watched
from torch import nn

from shoal import Loss
from shoal.core.errors import CheckpointError, ModelError
from shoal.engine import weights
from shoal.engine.held import Held
from shoal.engine.names import plain
from shoal.engine.randomness import seed_all
from shoal.engine.start import begin
from shoal.models.gpt import GPT
from shoal.parallel.shard.pieces import local

pytestmark = pytest.mark.ranks


def gpt():
    return GPT(61, 32, 4, 4, 16, tied=True)


def tokens() -> Rows:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 61, (8, 17), generator=generator)
    return Rows([(row[:-1], row[1:]) for row in rows])


def summed(output, targets):
    return Loss(nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def gpt_job(model=gpt, optimizer=None):
    made = optimizer or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    return job(model=model, data=tokens(), loss=summed, optimizer=made)


def whole(make, dtype=torch.float32, seed=0) -> dict[str, torch.Tensor]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    seed_all(seed)
    model = make()
    torch.set_default_dtype(before)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor for name, tensor in named}


LAYOUTS = {
    2: ("shard=2", "pipeline=2", "tensor=2"),
    4: ("shard=4", "replicate=2,shard=2", "pipeline=2,shard=2", "pipeline=2,tensor=2", "shard=2,tensor=2"),
}


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [(2, "fp32"), (2, "fp64"), (4, "fp32"), pytest.param(4, "fp64", marks=pytest.mark.nightly)],
)
def test_each_layout_begins_with_the_weights_of_the_model_and_holds_its_share_and_one_weight(
    tmp_path, ranks, precision
):
    """Every rank built the whole model and threw most of it away: the host's memory limited the model's size.

    https://github.com/pytorch/pytorch/issues/149640 https://github.com/verl-project/verl/issues/7834
    """
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]
    weight = largest_weight(gpt()) * dtype.itemsize // 4

    def body(rank):
        for mesh in LAYOUTS[ranks]:
            run, most, _ = watched(gpt_job(), tmp_path / mesh, mesh=mesh, precision=precision)
            compare(run, whole(gpt, dtype))
            share = share_of(run)
            assert share < 0.8 * bytes_of(whole(gpt, dtype).values()), mesh
            assert most <= share + weight + SLACK_BYTES, (mesh, most, share, weight)
            names = {plain(name) for name, _ in run.model.named_parameters()}
            assert "head.weight" not in names, "a tie is one parameter"

    run_ranks(body, ranks, timeout_s=200)


class Odd(nn.Module):
    """Buffers, tensors that are attributes, a scale without dimensions, weights that are made of others, and
    statistics of a forward within the constructor."""

    def __init__(self):
        super().__init__()
        self.lin, self.emb, self.norm = nn.Linear(8, 8), nn.Embedding(10, 8, padding_idx=3), nn.BatchNorm1d(8)
        self.cell, self.cut = nn.LSTM(3, 4), nn.Linear(8, 8)
        nn.init.orthogonal_(self.lin.weight)
        nn.init.trunc_normal_(self.cut.weight, std=0.6, a=-1.0, b=1.0)
        self.register_buffer("frequency", 1.0 / 10 ** (torch.arange(0, 8).float() / 8))
        self.table = torch.outer(torch.arange(4.0), self.frequency)
        self.order = torch.randperm(7)
        self.register_buffer("numbers", torch.from_numpy(np.arange(4.0)))
        self.numbers[1:].mul_(2)
        self.register_buffer("tenths", torch.full((3,), 0.1))
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.scale.role = "gain"
        self.again = nn.Module()
        self.again.scale = self.scale
        self.every = [self.scale, self.lin.weight]
        self.scale.register_hook(lambda gradient: gradient * 3)
        self.last = nn.Parameter(torch.randn(3, 3) @ self.lin.weight.data[:3, :3])
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())
        self.phase = nn.Parameter(self.wave.detach().imag * 2)
        self.width = self.norm(torch.randn(4, 8)).shape[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whatever_a_constructor_makes_is_there(dtype):
    """Tied weights became two tensors after a start without data.

    https://github.com/verl-project/verl/issues/7834 https://github.com/meta-pytorch/torchtune/issues/616
    """

    def body(rank):
        seed = lambda: torch.manual_seed(5)  # noqa: E731
        state = torch.get_rng_state()
        made = begin(Odd, seed, dtype)
        assert made.whole is None
        meta = [param for param in made.model.parameters() if param.is_meta]
        assert len(meta) == len(list(made.model.parameters()))
        made.fill(Held(), frozenset(), None, torch.device("cpu"), False)
        assert torch.equal(torch.get_rng_state(), state)
        torch.set_default_dtype(dtype)
        seed()
        single, model = Odd(), made.model
        for (name, a), (other, b) in zip(single.state_dict().items(), model.state_dict().items(), strict=True):
            assert name == other and torch.equal(a, b), name
        assert torch.equal(model.table, single.table) and torch.equal(model.order, single.order)
        assert model.again.scale is model.scale and model.scale.role == "gain"
        assert model.every[0] is model.scale and model.every[1] is model.lin.weight
        (model.scale * 2).backward()
        assert float(model.scale.grad) == 6.0
        x = torch.randn(5, 2, 3)
        assert torch.equal(model.cell(x)[0], single.cell(x)[0])

    run_ranks(body, 1)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 4)
        if float(self.lin.weight.sum()) > -1e9:
            nn.init.normal_(self.lin.bias)


class Guarding(nn.Module):
    """Goes on in another way where values cannot be read."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 4)
        try:
            scale = float(self.lin.weight.std())
        except Exception:
            scale = 1.0
        nn.init.constant_(self.lin.bias, scale)


class Seeding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.lin = nn.Linear(8, 4)


class Generating(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(1)))


class Changing(nn.Module):
    """What is there before is changed in place, by way of a view."""

    given = torch.ones(4)

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.weight = nn.Parameter(self.given)
        with torch.no_grad():
            self.weight[:2].zero_()


class Elsewhere(nn.Module):
    """Built on another device first."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.lin = nn.Linear(2, 2)
        self.lin.to_empty(device="cpu")
        nn.init.ones_(self.lin.weight)
        nn.init.zeros_(self.lin.bias)


class Threading(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        thread = threading.Thread(target=lambda: self.lin.weight.data.zero_())
        try:
            thread.start()
            thread.join()
        except Exception:
            pass  # also a constructor that goes on is not believed


class Thin(nn.Module):
    """Made with a sparse tensor."""

    chosen = torch.eye(2).to_sparse()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.sparse.mm(self.chosen, torch.randn(2, 2)))


class Keeping(nn.Module):
    """A tensor in an object that is no module."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        table = torch.arange(3.0)
        self.cache = lambda: table


STRANGE = {
    Reading: "DataDependentOutput", Guarding: "DataDependentOutput",
    Seeding: "sets a seed of its own", Generating: "a generator of its own",
    Changing: "changes, or looks into, a tensor", Elsewhere: "makes tensors on meta",
    Threading: "works in threads", Thin: "not dense", Keeping: "kept beside its modules",
}  # fmt: skip


def test_a_constructor_that_cannot_be_replayed_is_run_whole_for_a_reason():
    given = nn.Linear(2, 2)

    def body(rank):
        seed = lambda: torch.manual_seed(5)  # noqa: E731
        found = {}
        for kind in STRANGE:
            made = begin(kind, seed, None)
            found[kind.__name__] = made.whole
            made.strip()
            assert all(param.is_meta for param in made.model.parameters())
            made.fill(Held(), frozenset(), None, torch.device("cpu"), False)
            seed()
            wanted = kind().state_dict()
            assert all(torch.equal(value, wanted[name]) for name, value in made.model.state_dict().items()), kind
        assert "was built before" in begin(lambda: given, seed, None).whole
        other = begin(lambda: nn.Linear(2, 2 + torch.distributed.get_rank()), seed, None)
        return found, other.whole

    for found, other in run_ranks(body, 2):
        assert all(text in found[kind.__name__] for kind, text in STRANGE.items()), found
        assert "on other ranks" in other


def test_a_model_that_loads_its_weights_itself_is_built_whole_and_has_them(tmp_path, capfd):
    save_file({"weight": torch.full((2, 2), 3.0), "bias": torch.ones(2)}, tmp_path / "w.safetensors")
    torch.save({"weight": torch.full((2, 2), 3.0), "bias": torch.ones(2)}, tmp_path / "w.pt")

    def body(rank):
        for read in (lambda: load_file(tmp_path / "w.safetensors"), lambda: torch.load(tmp_path / "w.pt")):

            def make(read=read):
                model = nn.Linear(2, 2)
                model.load_state_dict(read())
                return model

            made = begin(make, lambda: torch.manual_seed(5), None)
            assert made.whole is not None
            made.strip()
            made.fill(Held(), frozenset(), None, torch.device("cpu"), False)
            assert float(made.model.weight.sum()) == 12.0

    run_ranks(body, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_parameters_that_share_memory_without_being_one_are_refused():
    def alias():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = nn.Parameter(model[0].weight.data)
        return model

    there = alias()

    def body(rank):
        for make in (alias, lambda: there):
            with pytest.raises(ModelError, match="0.weight and 1.weight share memory.*one and the same nn.Parameter"):
                begin(make, lambda: torch.manual_seed(5), None).strip()

    run_ranks(body, 1)


def drawing_by_rank():
    torch.empty(torch.distributed.get_rank() + 1).normal_()
    return gpt()


def test_a_run_says_that_it_built_the_model_whole_and_why(tmp_path):
    """Also where each rank would draw weights of its own: rank 0's hold."""

    def reading():
        model = gpt()
        assert float(model.norm.weight.sum()) > 0
        return model

    def body(rank):
        notes = []
        run = start(gpt_job(reading), tmp_path / "reading", notes.append, global_batch=8, steps=1, mesh="pipeline=2")
        compare(run, whole(gpt))
        for mesh in ("shard=2", "tensor=2"):
            run = start(gpt_job(drawing_by_rank), tmp_path / mesh, notes.append, global_batch=8, steps=1, mesh=mesh)
            sums = [None, None]
            torch.distributed.all_gather_object(sums, float(local(run.model.norm.weight.detach()).sum()))
            found = run.model.positions.weight.detach()
            expected = [None, None]
            torch.distributed.all_gather_object(expected, whole(drawing_by_rank)["positions.weight"])
            for part in run.held.piece("positions.weight", found).parts:
                assert torch.equal(part.tensor, part.box.of(expected[0]))
        return notes

    notes = run_ranks(body, 2, timeout_s=120)[0]
    told = [note for note in notes if "builds the whole model before it is divided" in note]
    assert len(told) == 3 and "DataDependentOutput" in told[0] and "on other ranks" in told[1]


def test_an_optimizer_that_makes_state_at_once_has_it_of_what_is_held(tmp_path):
    """Adagrad's sums are made with it, over the whole model; the update then met parts of other shapes, or no state."""

    def body(rank):
        made = gpt_job(optimizer=lambda m: torch.optim.Adagrad(m.parameters(), 0.1, initial_accumulator_value=0.5))
        found = {}
        for mesh in (None, "shard=2", "pipeline=2", "tensor=2"):
            notes = []
            settings = {"global_batch": 8, "micro_batch": 1, "steps": 2, "epochs": 2, "mesh": mesh}
            run = start(made, tmp_path / str(mesh), notes.append, **settings)
            found[mesh] = [run.step(window).loss for window in run.windows()]
            assert any("Adagrad has state before its first step" in note for note in notes) is (
                mesh is not None and not rank
            )
        return found

    for found in run_ranks(body, 2, timeout_s=120):
        for losses in found.values():
            assert losses == pytest.approx(found[None], rel=1e-5)


def test_a_model_and_an_optimizer_that_exist_already_are_divided(tmp_path):
    def body(rank):
        found = {}
        for mesh in (None, "shard=2", "pipeline=2", "tensor=2"):
            torch.manual_seed(2)
            model, notes = gpt(), []
            given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.1).cumsum(0)
            given.step()  # it has momentum already
            given.zero_grad()
            made = gpt_job(lambda model=model: model, lambda model, given=given: given)
            settings = {"global_batch": 8, "micro_batch": 1, "steps": 2, "epochs": 2, "mesh": mesh}
            run = start(made, tmp_path / str(mesh), notes.append, **settings)
            assert run.model is model
            found[mesh] = [run.step(window).loss for window in run.windows()]
            assert any("built before" in note for note in notes) is (mesh is not None and not rank)
        return found

    for found in run_ranks(body, 2, timeout_s=120):
        for losses in found.values():
            assert losses == pytest.approx(found[None], rel=1e-5)


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.lin = nn.Linear(32, 32)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.lin(x).tanh() * self.mask


class Sharing(nn.Module):
    """Blocks that have one buffer in common."""

    def __init__(self):
        super().__init__()
        mask = torch.ones(32)
        self.blocks = nn.ModuleList(Masked(mask) for _ in range(4))
        self.head = nn.Linear(32, 61)

    def forward(self, ids):
        x = nn.functional.one_hot(ids % 32, 32).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_buffer_that_blocks_of_two_stages_share_is_saved_by_each_for_its_own(tmp_path):
    def body(rank):
        settings = {"global_batch": 8, "micro_batch": 2, "steps": 1, "mesh": "pipeline=2"}
        run = start(gpt_job(Sharing), tmp_path / "run", **settings)
        for window in run.windows():
            run.step(window)
        held = [not block.mask.is_meta for block in run.model.blocks]
        assert held == [not block.lin.weight.is_meta for block in run.model.blocks] and any(held) and not all(held)
        run.save()
        run.close()
        again = start(gpt_job(Sharing), tmp_path / "run", **settings, resume=True)
        assert again.step_count == 1

    run_ranks(body, 2)


def save_like_hugging_face(folder, tensors, files=2) -> None:
    folder.mkdir()
    names = sorted(tensors)
    index = {name: f"model-{place % files + 1:05d}-of-{files:05d}.safetensors" for place, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name].contiguous() for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_given_weights_are_read_into_each_part_and_none_are_drawn(tmp_path):
    """Of several files with an index, in another dtype, ties once; and a resume likewise."""
    given = {name: tensor.bfloat16() for name, tensor in whole(gpt, seed=9).items() if name != "head.weight"}
    save_like_hugging_face(tmp_path / "given", given)
    weight = largest_weight(gpt())
    wanted = {name: tensor.float() for name, tensor in given.items()}

    def body(rank):
        for mesh in LAYOUTS[2]:
            out = tmp_path / mesh
            run, most, draws = watched(gpt_job(), out, mesh=mesh, init_from=str(tmp_path / "given"))
            compare(run, wanted)
            share = share_of(run)
            assert not draws and most <= share + weight + SLACK_BYTES, mesh
            for window in run.windows():
                run.step(window)
            run.save()
            run.close()
            trained = {name: local(p.detach()).clone() for name, p in run.model.named_parameters() if not p.is_meta}
            again, most, draws = watched(gpt_job(), out, mesh=mesh, resume=True)
            assert not draws and most <= share + weight + SLACK_BYTES, mesh
            found = {name: local(p.detach()) for name, p in again.model.named_parameters() if not p.is_meta}
            assert found.keys() == trained.keys() and all(torch.equal(found[name], trained[name]) for name in found)

    run_ranks(body, 2, timeout_s=120)


def test_no_more_of_a_file_is_read_than_is_held(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({name: t for name, t in whole(gpt, seed=9).items() if name != "head.weight"}, file)

    def body(rank):
        for mesh in LAYOUTS[2]:
            asked, slices = [], weights._slices

            def look(part, asked=asked, slices=slices):
                asked.append(part.tensor.numel())
                return slices(part)

            with mock.patch.object(weights, "_slices", look):
                run = start(gpt_job(), tmp_path / mesh, global_batch=8, steps=1, mesh=mesh, init_from=str(file))
            compare(run, whole(gpt, seed=9))
            assert sum(asked) == sum(local(p).numel() for p in run.model.parameters() if not p.is_meta)

    run_ranks(body, 2)


def test_folders_of_weights_that_are_not_whole_are_refused(tmp_path):
    """Names of the inner model are taken; what an index or several files leave open is not guessed."""
    model = nn.ModuleDict({"body": nn.Linear(2, 2)})
    tensors = {name: torch.ones_like(t) for name, t in model["body"].state_dict().items()}
    save_like_hugging_face(tmp_path / "inner", tensors)
    assert "model's part body" in weights.load_weights(model, tmp_path / "inner")[0]
    assert all((param == 1).all() for param in model.parameters())
    save_like_hugging_face(tmp_path / "torn", tensors)
    index = tmp_path / "torn" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="weight is in model-00001-of-00002.*does not hold it"):
        weights.load_weights(model, tmp_path / "torn")
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be read as an index"):
        weights.load_weights(model, tmp_path / "torn")
    index.unlink()
    with pytest.raises(CheckpointError, match="holds 2 safetensors .* and not one index; name one file"):
        weights.load_weights(model, tmp_path / "torn")


def test_ranks_that_see_other_files_are_refused(tmp_path):
    for rank in range(2):
        save_file({"weight": torch.full((2, 2), float(rank)), "bias": torch.zeros(2)}, tmp_path / f"{rank}.safetensors")

    def body(rank):
        assert weights.load_weights(nn.Linear(2, 2), tmp_path / "0.safetensors", held=Held()) == []
        with pytest.raises(CheckpointError, match="rank 1 sees other bytes there than rank 0"):
            weights.load_weights(nn.Linear(2, 2), tmp_path / f"{rank}.safetensors", held=Held())

    run_ranks(body, 2)
