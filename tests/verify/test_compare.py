"""What two recordings tell: the measure, the copies and regions of ranks, ratios, and how much was really divided."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from shoal.plan.ranks import Coordinates
from shoal.verify.causes import largest_difference
from shoal.verify.compare import MULTIPLE, Comparison, Tolerance, compare, relative
from shoal.verify.probe import Probe
from shoal.verify.recording import Recording, Step, split
from shoal.verify.report import LayoutResult, Report

pytestmark = pytest.mark.unit

MODULES = {"embed.weight": "Embedding", "a.weight": "Linear", "a.bias": "Linear"}
Parts = dict[str, list[tuple[tuple[int, ...], np.ndarray]]]  # name -> (offsets, value)


def record(
    folder: Path, ranks: list[Parts], shapes: dict[str, tuple[int, ...]] | None = None, **told: Any
) -> Recording:
    """A recording of one step; ``at``: each rank's place, by default along replicate; ``ids``, ``losses`` by rank."""
    folder.mkdir(parents=True)
    places = told.pop("at", [{"replicate": rank} for rank in range(len(ranks))])
    ids = told.pop("ids", [[[rank]] for rank in range(len(ranks))])
    losses = told.pop("losses", [[1.0] for _ in ranks])
    for rank, parts in enumerate(ranks):
        arrays, facts = {}, {}
        for name, regions in parts.items():
            for number, (offsets, value) in enumerate(regions):
                arrays[f"{name}#{number}"] = value
                shape = (shapes or {}).get(name, value.shape)
                facts[f"{name}#{number}"] = {"name": name, "shape": shape, "offsets": offsets}
        dense = {
            name: np.ascontiguousarray(array) for name, array in arrays.items()
        }  # safetensors writes memory as it lies
        save_file(dense, folder / f"step-1-rank-{rank}.safetensors")
        at = dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor"), 0) | places[rank]
        row = {
            "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "applied": True, "reason": None, "count": 1.0, **told,
            "data_rank": at["replicate"] + 2 * at["shard"], "at": at, "ids": ids[rank], "tensors": facts,
            "micros": [{"number": n, "loss": loss, "count": 1.0} for n, loss in enumerate(losses[rank])],
        }  # fmt: skip
        (folder / f"step-1-rank-{rank}.json").write_text(json.dumps(row))
        names = [{"name": name, "module": module} for name, module in MODULES.items()]
        end = {"names": names, "steps": 1, "keyed": False, "off": [], "lifted": False, "carried": [], "notes": []}
        (folder / f"rank-{rank}.json").write_text(json.dumps(end))
    return Recording(folder)


def whole(**values: Any) -> Parts:
    """One rank's tensors, whole; ``gradient_embed`` is ``gradient/embed.weight``, and so on."""
    names = {"embed": "embed.weight", "a": "a.weight", "b": "a.bias"}
    parts: Parts = {}
    for key, value in values.items():
        kind, name = key.split("_")
        array = np.asarray(value, dtype=np.float64)
        parts[f"{kind}/{names[name]}"] = [((0,) * array.ndim, array)]
    return parts


def against(tmp_path: Path, mine: Parts, theirs: list[Parts], **told: Any) -> Comparison:
    """Several ranks' parts held against one device's. The samples are one micro-batch of all ranks."""
    single = record(tmp_path / "one", [mine], ids=[[list(range(len(theirs)))]], losses=[[float(len(theirs))]])
    return compare(single, record(tmp_path / "many", theirs, **told), Tolerance(1e-9))


GRID = np.arange(1.0, 13.0).reshape(4, 3)


def test_a_tensor_is_measured_by_its_own_size_or_a_thousandth_of_the_largest_of_its_kind(tmp_path: Path) -> None:
    mine = whole(gradient_embed=[1000.0], gradient_a=[1e-9], gradient_b=[10.0], weight_a=[1e-9])
    theirs = whole(gradient_embed=[1000.0], gradient_a=[2e-9], gradient_b=[10.0 + 1e-6], weight_a=[1.5e-9])
    found = against(tmp_path, mine, [theirs])
    assert found.errors[1, "gradient/a.weight"] == pytest.approx(1e-9)
    assert found.errors[1, "gradient/a.bias"] == pytest.approx(1e-7)
    assert found.errors[1, "weight/a.weight"] == pytest.approx(0.5), "weights are measured among weights"
    assert found.largest("gradient/") == pytest.approx(1e-7) and found.largest("weight/", "buffer/") == pytest.approx(
        0.5
    )
    assert str(found.first) == "step 1: gradient of 'a.bias'"
    assert found.first and found.first.module == "module 'a' (Linear)"


def test_the_first_in_the_models_order_is_named_gradients_before_weights(tmp_path: Path) -> None:
    mine = whole(weight_embed=[1.0], gradient_a=[1.0], gradient_b=[1.0])
    theirs = whole(weight_embed=[3.0], gradient_a=[1.5], gradient_b=[4.0])
    assert str(against(tmp_path, mine, [theirs]).first) == "step 1: gradient of 'a.weight'"


def test_regions_are_put_together_and_a_missing_one_is_named(tmp_path: Path) -> None:
    shapes = {"gradient/a.weight": (4, 3)}
    rows = [{"gradient/a.weight": [((at, 0), GRID[at : at + 2])]} for at in (0, 2)]
    assert against(tmp_path / "right", whole(gradient_a=GRID), rows, shapes=shapes).first is None
    first = against(tmp_path / "lacks", whole(gradient_a=GRID), rows[:1], shapes=shapes).first
    assert first and math.isinf(first.error) and first.why == "missing region: no rank holds [2:4, 0:3]"
    half = [rows[0], {"gradient/a.weight": [((2, 0), GRID[2:] / 2)]}]
    first = against(tmp_path / "half", whole(gradient_a=GRID), half, shapes=shapes).first
    assert first and "only part of the elements differ: 6 of 12, within [2:4, 0:3], which are 1/2 of" in first.why
    first = against(tmp_path / "shape", whole(gradient_a=GRID), [whole(gradient_a=GRID.T)]).first
    assert first and first.why == "it has shape [3, 4], on one device [4, 3]"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([GRID * 2, GRID * 2], "every element is 2 x one device's: summed 2 times (replicate has 2 ranks)"),
        ([GRID * 3, GRID * 3], "every element is 3 x one device's: summed 3 times"),
        ([GRID / 2, GRID / 2], "every element is 1/2 of one device's: divided by 2"),
        ([GRID * 0, GRID * 0], "every element is 0: it was never worked out, or not handed on"),
        ([-GRID, -GRID], "every element is -1 x one device's: a sign is wrong"),
        ([GRID * 1.3, GRID * 1.3], "every element is 1.3 x one device's: a factor of its own"),
        ([GRID - 0.5, np.full_like(GRID, 0.5)], "not reduced: ranks 0, 1 hold their own shares, whose sum is right"),
        ([GRID, GRID + 1], "ranks 0, 1 hold different values, and rank 0 holds the right one"),
        ([GRID + 2, GRID + 1], "ranks 0, 1 hold different values: they were not updated alike"),
        ([GRID[::-1], GRID[::-1]], "100% of the elements differ, in no simple ratio"),
        ([GRID * np.nan, GRID * np.nan], "12 of 12 elements are not finite"),
    ],
)
def test_the_ratio_and_the_copies_tell_the_cause(tmp_path: Path, values: list[np.ndarray], text: str) -> None:
    first = against(tmp_path, whole(gradient_a=GRID), [whole(gradient_a=value) for value in values]).first
    assert first and first.why.startswith(text)


def test_one_factor_over_all_gradients_is_told_by_the_norm_that_was_reported(tmp_path: Path) -> None:
    mine, theirs = (whole(gradient_a=GRID * by, gradient_embed=GRID * by) for by in (1, 2))
    first = against(tmp_path / "factor", mine, [theirs, theirs]).first
    assert first and first.why.startswith(
        "wrong divisor: every gradient is 2 x one device's, their norm as reported 1 x"
    )
    first = against(tmp_path / "sum", mine, [theirs, theirs], grad_norm=2.0).first
    assert first and first.why == "every gradient is 2 x one device's: summed 2 times (replicate has 2 ranks)"
    first = against(tmp_path / "norm", mine, [mine, mine], grad_norm=2.0).first
    assert first and first.what == "gradient norm" and "left out of it or counted twice" in first.why


def test_missing_and_further_tensors_are_differences(tmp_path: Path) -> None:
    both, one = whole(gradient_a=GRID, gradient_b=[1.0]), whole(gradient_a=GRID)
    first = against(tmp_path / "less", both, [one]).first
    assert first and str(first) == "step 1: gradient of 'a.bias'" and first.why == "there is none under the layout"
    first = against(tmp_path / "more", one, [both]).first
    assert first and first.why == "there is none on one device"


@pytest.mark.parametrize(
    ("ids", "losses", "what", "text"),
    [
        ([[[0, 1], [2, 3]]], [[5.0, 7.0]], None, None),
        ([[[1, 0], [3, 2]]], [[5.0, 7.0]], None, None),
        ([[[2, 3], [0, 1]]], [[7.0, 5.0]], "sample ids", "swapped micro-batches: number 0 of the layout is number 1"),
        ([[[0, 2], [1, 3]]], [[5.0, 7.0]], "sample ids", "swapped micro-batches: they are made up of [[0, 2], [1, 3]]"),
        ([[[0, 1], [2, 9]]], [[5.0, 7.0]], "sample ids", "other samples were read"),
        ([[[0, 1], [2, 3]]], [[7.0, 5.0]], "loss", "swapped micro-batches: their losses are one device's in another"),
        ([[[0, 1], [2, 3]]], [[4.0, 8.0]], "loss", "micro-batches mixed"),
        ([[[0, 1], [2, 3]]], [[5.0, 8.0]], "loss", "the forward computes something else: losses"),
        ([[[0, 1], [2, 3], []]], [[5.0, 7.0, 0.0]], None, None),
    ],
)
def test_samples_and_losses_of_micro_batches(
    tmp_path: Path, ids: list, losses: list, what: str | None, text: str | None
) -> None:
    one = record(tmp_path / "one", [{}], ids=[[[0, 1], [2, 3]]], losses=[[5.0, 7.0]])
    first = compare(one, record(tmp_path / "many", [{}], ids=ids, losses=losses), Tolerance(1e-9)).first
    assert (first.what if first else None) == what
    assert first is None or (text is not None and first.why.startswith(text))


def test_ranks_of_one_model_that_read_other_samples(tmp_path: Path) -> None:
    at = [{"pipeline": 0}, {"pipeline": 1}]
    one = record(tmp_path / "one", [{}], ids=[[[0], [1]]], losses=[[1.0, 1.0]])
    many = record(tmp_path / "many", [{}, {}], at=at, ids=[[[0], [1]], [[1], [0]]], losses=[[], [1.0, 1.0]])
    first = compare(one, many, Tolerance(1e-9)).first
    assert first and first.why.startswith("swapped micro-batches: ranks 0 and 1 work on the same samples, but take")


def test_low_precision_allows_a_multiple_of_what_rounding_did() -> None:
    perturbed = {(1, "gradient/a"): 1e-3, (1, "gradient/b"): 1e-5, (1, "gradient/c"): 1e-5, (1, "loss"): 0.0}
    tolerance = Tolerance(1e-7, perturbed)
    assert tolerance.of(1, "gradient/a") == pytest.approx(MULTIPLE * 1e-3)
    assert tolerance.of(1, "gradient/b") == pytest.approx(MULTIPLE * 1e-5)
    assert tolerance.of(1, "gradient/new") == pytest.approx(MULTIPLE * 1e-5), "the typical one of its kind"
    assert tolerance.of(1, "loss") == tolerance.of(2, "weight/a") == 1e-7


def test_not_finite_numbers() -> None:
    nan, inf = math.nan, math.inf
    assert largest_difference(np.array([nan, inf, 1.0]), np.array([nan, inf, 1.5])) == 0.5
    assert largest_difference(np.array([1.0]), np.array([nan])) == inf
    assert relative(2.0, 1.0) == 0.5 and relative(0.0, 0.25) == 0.25 and relative(1.0, nan) == inf


def test_what_an_axis_really_divides_is_counted_in_weight_bytes(tmp_path: Path) -> None:
    both, mine = np.zeros((4, 4)), np.zeros((2, 4))
    shapes = {"weight/a.weight": (4, 4)}
    at = [{"tensor": 0}, {"tensor": 1}]
    ranks: list[Parts] = [
        {"weight/a.weight": [((rank * 2, 0), mine)], "weight/embed.weight": [((0, 0), both)]} for rank in (0, 1)
    ]
    shares = split(record(tmp_path / "tensor", ranks, shapes, at=at), {"pipeline": 1, "shard": 1, "tensor": 2})
    assert shares == {"tensor": 0.5}
    at = [{"pipeline": 0}, {"pipeline": 1}]
    stages: list[Parts] = [{"weight/embed.weight": [((0, 0), both)]}, {"weight/a.weight": [((0, 0), both)]}]
    shares = split(record(tmp_path / "stages", stages, at=at), {"pipeline": 2, "shard": 1, "tensor": 1})
    assert shares == {"pipeline": 1.0}


def test_a_report_says_what_it_found() -> None:
    equal = LayoutResult("tensor=2", "equal", 0.0, 1e-15, 1e-14, split={"tensor": 0.3})
    wrong = LayoutResult("pipeline=2", "different", 0.0, math.inf, 0.1, "step 1: gradient of 'a'", "a reason")
    refused = LayoutResult("replicate=3", "refused", reason="3 does not divide 8")
    assert Report([equal, refused], []).ok and Report([equal], []).verdict.startswith("the same: the layout computes")
    report = Report([equal, wrong, refused], [])
    assert not report.ok
    assert report.verdict == "NOT THE SAME: 1 of 3 layouts differ from one device or failed; 1 refused"
    assert list(report.as_json()) == ["layouts"]
    assert list(report.as_json()["layouts"][0]) == [
        "mesh", "status", "max_rel_loss", "max_rel_grad", "max_rel_weight", "first_difference", "reason", "split",
    ]  # fmt: skip
    assert "Infinity" not in json.dumps(report.as_json())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_tensors_are_recorded_and_their_imaginary_parts_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    """Only real parts were compared; complex128, as weights are in float64, could not be written at all."""
    whole = torch.complex(torch.ones(4, 3), torch.arange(12.0).view(4, 3)).to(dtype)
    run: Any = SimpleNamespace(layout=SimpleNamespace(data_rank=0, at=Coordinates(0, 0, 0, 0, 0)))
    report: Any = SimpleNamespace(
        step=1, loss=0.0, lr=0.0, grad_norm=0.0, applied=True, reason=None, count=1
    )  # fmt: skip
    for folder, value in (("mine", whole), ("theirs", whole.conj())):
        (tmp_path / folder).mkdir()
        probe = Probe(tmp_path / folder, 0)
        probe.tensors = {"weight/c": ((4, 3), [(value[2:], (2, 0))])}
        probe._write(run, report)
    (mine,), (theirs,) = (_told(tmp_path / folder).copies("weight/c") for folder in ("mine", "theirs"))
    assert mine.shape == (4, 3, 2) and mine.offsets == (2, 0, 0)
    assert np.array_equal(mine.value, torch.view_as_real(whole[2:]).numpy())
    assert largest_difference(mine.value, theirs.value) == 22.0


def _told(folder: Path) -> Step:
    return Step(1, {0: json.loads((folder / "step-1-rank-0.json").read_text())}, folder)
