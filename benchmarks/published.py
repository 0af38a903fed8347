"""How far are predicted step times and memory from published ones? Prints a table; with --json, one JSON line last.

python benchmarks/published.py [--data DIR] [--json] [--rows] [--plot FILE.svg]

Each row of each CSV in DIR (columns: published/README.md) is predicted from its shape, hardware and plan alone. Where a
row leaves recomputation or micro-batch open, the least recomputation that fits the device is taken, with the largest
micro-batch that does. Errors are fractions of what was measured. Out-of-memory rows count as recognised where the
predicted peak exceeds the device.
"""

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from published_cells import number
from published_rows import Case, read, rows
from published_systems import Skip

from shoal.cluster import picture
from shoal.cluster.facts import Device
from shoal.core.errors import ShoalError
from shoal.plan.candidate import Candidate
from shoal.plan.closed import closed_ranks
from shoal.plan.profile import Profile
from shoal.plan.shapes import Shape, Software, Split
from shoal.plan.time import Prices
from shoal.plan.transformer import model_flops, profile

HERE = Path(__file__).resolve().parent
COLUMNS = {"model", "gpu"}
#: Of a communicator of 2 and of more ranks, https://github.com/NVIDIA/nccl/issues/964 (A100, NVLink).
COMMUNICATOR_BYTES = (544e6, 688e6)
#: Where a row says that its rate is that of all devices.
TOTAL = re.compile(
    r"tokens[^;]*\b(in total|of all|over all|all gpus)|(total|aggregate|global) (tokens|throughput)", re.I
)


class Outcome(NamedTuple):
    """A row's prediction beside what was measured; None where not published."""

    case: Case
    candidate: Candidate
    step_s: float
    measured_s: float | None
    memory_gib: float
    fits: bool


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "published")
    parser.add_argument("--json", action="store_true", help="the same as one JSON line, last")
    parser.add_argument("--rows", action="store_true", help="each row's prediction too")
    parser.add_argument("--plot", type=Path, help="predicted over published as a picture, .svg or .html")
    return parser.parse_args()


@lru_cache(maxsize=512)
def profiled(shape: Shape, tokens: int, split: Split, precision: str, software: Software) -> Profile:
    return profile(shape, tokens, split, precision, software)


def profile_of(case: Case, candidate: Candidate) -> Profile:
    mesh = candidate.mesh
    split = Split(mesh.tensor, candidate.sequence_parallel, mesh.context, candidate.expert)
    return profiled(case.shape, case.tokens, split, candidate.precision, case.system.software)


def memory(case: Case, candidate: Candidate, tensors: bool = False) -> list[float]:
    """Bytes of each pipeline coordinate, without what the device's context takes; ``tensors``: nor what the allocator
    reserves beyond."""
    factor = 1.0 if tensors else case.system.reserved[candidate.mesh.pipeline > 1]
    device = case.cluster.device
    found = closed_ranks(profile_of(case, candidate), candidate, device)
    return [(one.total_bytes - one.overhead) * factor + case.system.workspaces(device) for one in found]


def reserved(case: Case, candidate: Candidate) -> list[float]:
    """Bytes that the allocator holds, of each pipeline coordinate: what the backward needs, and beside it what a step
    of the optimizer makes and leaves, whose pieces differ in size; no more than the device has."""
    device, states = case.cluster.device, candidate.states
    before = candidate._replace(states=states._replace(step=0.0))
    held = closed_ranks(profile_of(case, before), before, device)
    updated = [one.optimizer / states.optimizer if states.optimizer else 0.0 for one in held]
    made = states.step + case.system.stranded
    room = room_bytes(case, candidate)
    return [min(room, most + made * count) for most, count in zip(memory(case, before), updated, strict=True)]


def outside_bytes(case: Case, candidate: Candidate) -> float:
    """What the device holds beside the allocator: its context, and the buffers of NCCL's communicators, one for each
    axis of more than one rank and, of several axes, one of all ranks."""
    degrees = [*candidate.mesh.degrees.values(), candidate.expert]
    groups = [degree for degree in degrees if degree > 1]
    groups += [candidate.world] if len(groups) > 1 else []
    return case.cluster.device.reserved_bytes + sum(COMMUNICATOR_BYTES[ranks > 2] for ranks in groups)


def room_bytes(case: Case, candidate: Candidate) -> float:
    """What the allocator may hold."""
    return case.cluster.device.memory_bytes - outside_bytes(case, candidate)


def choose(case: Case) -> tuple[Candidate, list[float], bool]:
    """Of the candidates with the least recomputation that fit, the fastest (without a published rate: the first); else
    the last of all: its bytes by rank, and whether it fits."""
    for _, group in groupby(case.candidates, key=lambda one: (one.keep, one.offload_activations)):
        tried = [(candidate, memory(case, candidate)) for candidate in group]
        fit = [(one, needed) for one, needed in tried if max(needed) <= room_bytes(case, one)]
        if len(fit) > 1 and case.rate:
            return *min(fit, key=lambda pair: per_sample(case, pair[0])), True
        if fit:
            return *fit[0], True
    return *tried[-1], max(tried[-1][1]) <= room_bytes(case, tried[-1][0])


def per_sample(case: Case, candidate: Candidate) -> float:
    """Seconds of a step over its samples."""
    return Prices(profile_of(case, candidate), case.cluster).price(candidate).step_s / candidate.global_batch


def predict(row) -> Outcome:
    """Raises Skip."""
    case = read(row)
    candidate, needed, fits = choose(case)
    cost = Prices(profile_of(case, candidate), case.cluster).price(candidate)
    if re.search("allocated|active memory", row["notes"].lower()):
        needed = memory(case, candidate, tensors=True)
    elif candidate.states.step:
        needed = reserved(case, candidate)
    place = -1 if "last rank" in row["notes"] else 0 if case.system.name == "nanotron" else needed.index(max(needed))
    shown = needed[place] + ("nvidia-smi" in row["notes"]) * outside_bytes(case, candidate)
    return Outcome(case, candidate, cost.step_s, measured(case, candidate), shown / 2**30, fits)


def measured(case: Case, candidate: Candidate) -> float | None:
    """Seconds of a step as published; rates of FLOPs by the convention that the row states."""
    if case.rate is None:
        return None
    kind, value = case.rate
    if kind == "step_time_s":
        return value
    tokens = candidate.global_batch * case.tokens / candidate.world
    if kind == "tokens_per_s_per_gpu":
        return tokens / (value / candidate.world if TOTAL.search(case.row["notes"]) else value)
    if kind == "mfu":
        value = value / 100 * half_precision_flops_per_s(case.cluster.device) / 1e12
    return tokens * flops_per_token(case, candidate) / (value * 1e12)


def half_precision_flops_per_s(device: Device) -> float:
    """The peak that utilisation is a share of."""
    return device.flops_per_s.get("bf16") or device.flops_per_s["fp16"]


def flops_per_token(case: Case, candidate: Candidate) -> float:
    """Of forward and backward, by the row's convention: 6N + 12Lhs, causal half, or with recomputation."""
    notes, shape = case.row["notes"], case.shape
    again = 4 / 3 if "HARDWARE" in notes and candidate.recompute == "full" else 1.0
    if "12Lhs" in notes and (billions := number(case.row, "params_b")):
        return again * (6e9 * billions + 12 * shape.layers * shape.hidden * case.tokens)
    half = "half" in notes or "Megatron-core" in notes or case.system.name == "megatron"
    return again * 3 * model_flops(shape, case.tokens, 0.5 if half else 1.0) / case.tokens


def outcomes(path: Path) -> tuple[dict[int, Outcome], Counter[str]]:
    """The predicted rows of a file by their line, and how many were skipped by reason."""
    found: dict[int, Outcome] = {}
    skipped: Counter[str] = Counter()
    for index, row in enumerate(rows(path), 2):
        try:
            found[index] = predict(row)
        except Skip as skip:
            skipped[str(skip)] += 1
        except ShoalError as error:
            skipped[str(error).split(";")[0]] += 1
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            skipped[f"not understood: {type(error).__name__}: {error}"] += 1
    return found, skipped


def summary(name: str, found: Sequence[Outcome], skipped: Counter[str]) -> dict:
    """What a file's rows give."""
    oom = [one for one in found if one.case.oom]
    ran = [one for one in found if not one.case.oom]
    steps = [abs(predicted / published - 1) for published, predicted in step_pairs(ran)]
    memories = [abs(predicted / published - 1) for published, predicted in memory_pairs(ran)]
    return {
        "file": name,
        "rows": len(found) + skipped.total(),
        "predicted": len(steps),
        "step_median": middle(steps),
        "step_mean": statistics.fmean(steps) if steps else None,
        "memory_rows": len(memories),
        "memory_median": middle(memories),
        "oom_rows": len(oom),
        "oom_recognised": sum(not one.fits for one in oom) / len(oom) if oom else None,
        "false_alarms": sum(not one.fits for one in ran) / len(ran) if ran else None,
        "skipped": dict(skipped),
    }


def step_pairs(found: Iterable[Outcome]) -> list[tuple[float, float]]:
    """Published and predicted seconds of a step."""
    return [(one.measured_s, one.step_s) for one in found if one.measured_s and not one.case.oom]


def memory_pairs(found: Iterable[Outcome]) -> list[tuple[float, float]]:
    """Published and predicted GiB."""
    return [(one.case.memory_gib, one.memory_gib) for one in found if one.case.memory_gib and not one.case.oom]


def middle(values):
    return statistics.median(values) if values else None


def line(index: int, outcome: Outcome) -> str:
    candidate, case = outcome.candidate, outcome.case
    step = f"{outcome.step_s:.4g} s for {outcome.measured_s:.4g}" if outcome.measured_s else "-"
    memory_ = f"{outcome.memory_gib:.1f} GiB for {case.memory_gib:.1f}" if case.memory_gib else "-"
    return (
        f"{index}: {case.shape.name} {case.cluster.device.name} {candidate.mesh} micro {candidate.micro_batch} x "
        f"{candidate.accumulation} recompute {1 - candidate.keep:.2g}: step {step}, memory {memory_}"
    )


def shown(value):
    return "-" if value is None else f"{100 * value:.1f} %"


def text_of(one):
    alarms, steps = shown(one["false_alarms"]), (shown(one["step_median"]), shown(one["step_mean"]))
    return (
        f"{one['file']}: {one['rows']} rows, {one['predicted']} steps predicted: median {steps[0]}, mean {steps[1]}; "
        f"memory of {one['memory_rows']}: {shown(one['memory_median'])}; out of memory {one['oom_rows']}: "
        f"{shown(one['oom_recognised'])} recognised, false alarms {alarms}; skipped {one['skipped']}"
    )


def main():
    options = arguments()
    paths = sorted(options.data.glob("*.csv"))
    if not paths:
        sys.exit(f"no CSV in {options.data}; give a folder with --data")
    files, drawn = [], {}
    for path in paths:
        with open(path, encoding="utf-8-sig") as file:
            if COLUMNS - {name.strip().lower() for name in file.readline().split(",")}:
                continue  # another kind of table
        found, skipped = outcomes(path)
        if options.rows:
            print("\n".join(line(index, outcome) for index, outcome in found.items() if not outcome.case.oom))
        files.append(summary(path.name, list(found.values()), skipped))
        drawn[path.stem] = found.values()
        print(text_of(files[-1]))
    if options.plot:
        steps = picture.against(
            "seconds of a step: predicted over published", "s", {n: step_pairs(f) for n, f in drawn.items()}
        )
        held = picture.against("GiB: predicted over published", "GiB", {n: memory_pairs(f) for n, f in drawn.items()})
        picture.save(picture.drawn([steps, held]), options.plot, "published", "\n".join(map(text_of, files)))
    if options.json:
        print(json.dumps({"files": files}))


if __name__ == "__main__":
    main()
