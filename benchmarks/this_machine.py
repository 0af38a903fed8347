"""Does the planner foretell this machine? Every plan of some models predicted, run, and compared; one JSON line.

python benchmarks/this_machine.py                        # about half an hour on two idle cores, as root
python benchmarks/this_machine.py --models gated mixer translator --links loopback "200 Mbit/s" --steps 3 --budget-s 20
                                                         # a quarter of an hour: models that no constant was fitted on
python benchmarks/this_machine.py --raw raw.json         # keep what was measured
python benchmarks/this_machine.py --from raw.json ...    # predict anew from such files, in seconds

Worlds of 2 and of 4 workers of one thread. Links: loopback, and two network namespaces (made here, gone afterwards)
with half of the ranks in each, joined by a veth pair that ``tc ... tbf`` limits. Constants are what ``shoal measure``
measures in the same workers: products, memory, launches and optimizer over loopback, collectives over each link. A
plan is a mesh, a way to hold weights and a schedule; pipelines run four micro-batches a rank. A measured step is the
slowest rank's time from one barrier to the step's end, the median after two (slow ones: one) to warm up; plans run
once in their order, the fast ones once more in the other, and the faster run counts; constants are taken before and
between, and the less disturbed count.

Kendall tau is tau-b over the plans of one model, world and link. Regret: how much slower than the fastest measured
plan the one is that was predicted to be the fastest.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # the first optimizer imports it: once here instead of in every forked worker
import torch.distributed as dist
from machine_jobs import JOBS, NEW

from shoal.blueprint.stored import Sketch
from shoal.cluster import picture
from shoal.cluster.bench import LINKS, Bench
from shoal.cluster.facts import Cluster
from shoal.cluster.grid import MIB, Grid, grid
from shoal.cluster.measure import measure
from shoal.core import toml
from shoal.engine.build import Place, build
from shoal.engine.run import Hooks, Run
from shoal.engine.settings import RunSettings
from shoal.launch.answer import Planned, profiles_of, question_of
from shoal.launch.sketch import sketch_apart
from shoal.launch.worker import die_with_parent
from shoal.plan.candidate import Candidate, Cost
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.search import Search
from shoal.plan.space import Core, Spread, candidate, spreads

MBIT = 1e6 / 8
#: Bytes per second between the namespaces; None: no namespaces.
LINK_RATES: dict[str, float | None] = {
    "loopback": None, "1 Gbit/s": 1000 * MBIT, "200 Mbit/s": 200 * MBIT, "50 Mbit/s": 50 * MBIT
}  # fmt: skip
WORLDS = (2, 4)
MICRO_BATCHES = 4
TIMEOUT_S = 90.0
SLOW_S = 1.0
CLONE_NEWNET = 0x40000000
#: Schedules by (pipeline, other ranks).
SCHEDULES = {
    (2, 1): (("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-zero-bubble", 1)),
    (4, 1): (("1f1b", 1), ("interleaved-1f1b", 2)),
    (2, 2): (("1f1b", 1),),
}


# Plans and predictions


def searches(sketches: dict[str, Sketch], cluster: Cluster, batch: int) -> dict[str, Search]:
    """One for each model; they cut stages by the cluster's own costs."""
    return {
        name: Search(profiles_of(sketch, cluster), cluster, question_of(sketch, cluster, batch))
        for name, sketch in sketches.items()
    }


def candidates(search: Search) -> Iterator[Candidate]:
    """Every plan that is run: one micro-batch without a pipeline, four with one; nothing recomputed or offloaded."""
    for core in search.cores():
        if core.recompute == "none" and _wanted(core, search.question.world):
            for spread in spreads(core.data):
                if not spread.offload and _worth(core, spread):
                    yield candidate(search.question, core, spread, search.starts(core))


def _wanted(core: Core, world: int) -> bool:
    if core.sequence_parallel and core.tensor < world:
        return False
    if core.pipeline == 1:
        return core.accumulation == 1
    wanted = SCHEDULES[core.pipeline, world // core.pipeline]
    return core.accumulation == MICRO_BATCHES and (core.schedule, core.chunks) in wanted


def _worth(core: Core, spread: Spread) -> bool:
    """Levels 1 and 2 are one program where a window is one micro-batch, pipelines hold weights whole within a step, and
    in hybrids level 3 stands for all."""
    return spread.level == 3 or (spread.level == 1 and spread.shard == core.data and core.pipeline * core.tensor == 1)


def told(made: Candidate) -> dict[str, Any]:
    """A candidate in plain values."""
    return {
        "mesh": {name: degree for name, degree in made.mesh.degrees.items() if degree > 1},
        "micro_batch": made.micro_batch, "accumulation": made.accumulation, "starts": list(made.starts),
        "schedule": made.schedule, "chunks": made.chunks, "shard_level": made.shard_level,
        "sequence_parallel": made.sequence_parallel,
    }  # fmt: skip


def heard(values: dict[str, Any], search: Search) -> Candidate:
    """The candidate again."""
    given = {**values, "mesh": Mesh(**values["mesh"]), "starts": tuple(values["starts"])}
    question = search.question
    return Candidate(**given, precision=question.precision, states=question.states, bucket_bytes=question.bucket_bytes)


def cost(search: Search, made: Candidate) -> Cost:
    """What is predicted."""
    return search.prices[made.mesh.tensor, made.sequence_parallel].price(made)


# A worker


class Host(NamedTuple):
    """Where a rank runs."""

    rank: int
    world: int
    namespace: str | None
    interface: str
    nodes: int

    @property
    def local_rank(self) -> int:
        """Its number on its node."""
        return self.rank % (self.world // self.nodes)


def work(host: Host, pipe: Any, folder: Path, launcher: int) -> None:
    """Answer questions until told to end."""
    try:
        die_with_parent(launcher)
        warnings.simplefilter("ignore", FutureWarning)
        torch.set_num_threads(1)
        if host.namespace is not None:
            _enter(host.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = host.interface
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'meet'}", rank=host.rank, world_size=host.world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        for number, (what, values) in enumerate(iter(pipe.recv, None)):
            pipe.send({"constants": constants, "steps": steps}[what](host, folder / str(number), **values))
        os._exit(0)
    except BaseException:
        pipe.send({"error": traceback.format_exc()})
        os._exit(1)


def _enter(namespace: str) -> None:
    """Move this process to a network namespace; its other threads are made later."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {namespace} cannot be entered")


def constants(host: Host, folder: Path, device: str | None, budget_s: float) -> dict[str, Any]:
    """The cluster as TOML. ``device``: a cluster of as many workers, whose device is taken. Collective."""
    folder.mkdir(exist_ok=True)
    usual = grid("cpu").model_copy(update={"precisions": (), "budget_s": budget_s, "disk_bytes": MIB})
    place = torch.device("cpu")
    if device is None:
        return {"cluster": measure(place, host.local_rank, usual, folder, _silent).to_toml()}
    known = Cluster.parse(_toml(device), "constants")
    return {"cluster": linked(host, known, usual, place).to_toml()}


def linked(host: Host, known: Cluster, sizes: Grid, place: torch.device) -> Cluster:
    """Another world's device with the links of this one. Collective."""
    bench, per_node = Bench(place, sizes, _silent, host.rank, host.world), host.world // host.nodes
    part = LINKS / max(1, (per_node > 1) + (host.nodes > 1))
    inside = bench.link("inside", range(2, per_node + 1), 1, part) if per_node > 1 else None
    between = bench.link("between", range(2, host.nodes + 1), per_node, part)
    device = known.device.model_copy(update={"overlap_slowdown": bench.overlap(between)})
    changes = {"device": device, "devices_per_node": per_node, "nodes": host.nodes, "inside": inside}
    return known.model_copy(update={**changes, "between": between})


def _silent(part: float, text: str) -> None:
    return None


def steps(host: Host, folder: Path, job: str, plan: dict[str, Any], most: int, budget_s: float) -> dict[str, Any]:
    """Seconds of each step after the first, the slowest rank's. Collective."""
    folder.mkdir(exist_ok=True)
    path = folder / f"plan-{host.rank}.toml"
    Plan.parse({**plan, "mesh": Mesh(**plan["mesh"])}, "plan").write(path)
    settings = RunSettings(
        out=str(folder / "run"), plan=str(path), global_batch=plan["global_batch"], steps=most + 3, epochs=1000,
        kernels="default", sinks=(),
    )  # fmt: skip
    run = build(JOBS[job](), settings, Place(torch.device("cpu")), Hooks())
    found = _timed(run, most, budget_s)
    run.close()
    return {"steps_s": found[1 if found[1] > SLOW_S else 2 :]}  # at first the heap still grows


def _timed(run: Run, most: int, budget_s: float) -> list[float]:
    found: list[float] = []
    for window in run.windows():
        dist.barrier()
        start_s = time.perf_counter()
        run.step(window)
        took = torch.tensor(time.perf_counter() - start_s)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(float(took))
        enough = len(found) > most + 1 or (len(found) > 3 and sum(found) > budget_s)
        if enough:  # the same on all ranks
            break
    return found


# All workers of a world, and what joins them


class Workers:
    """Processes of one world over one link; as they were forked they end with this one."""

    def __init__(self, world: int, link: str) -> None:
        self.hosts = [_host(rank, world, LINK_RATES[link]) for rank in range(world)]
        self.processes: list[Any] = []

    def start(self) -> None:
        """Fork them anew."""
        self.folder = tempfile.TemporaryDirectory(prefix="this-machine-")
        context = multiprocessing.get_context("fork")
        self.pipes, ends = zip(*(context.Pipe() for _ in self.hosts), strict=True)
        self.processes = [
            context.Process(target=work, args=(host, end, Path(self.folder.name), os.getpid()), daemon=True)
            for host, end in zip(self.hosts, ends, strict=True)
        ]
        for process in self.processes:
            process.start()

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """The first rank's answer; an ``error`` where any failed, and then they begin anew."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((what, values))
        answers = [pipe.recv() if pipe.poll(TIMEOUT_S) else {"error": "no answer in time"} for pipe in self.pipes]
        failed = next((answer for answer in answers if "error" in answer), None)
        if failed is not None:
            self.stop()
        return failed or answers[0]

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            self.folder.cleanup()
        self.processes = []


def _host(rank: int, world: int, rate: float | None) -> Host:
    if rate is None:
        return Host(rank, world, None, "lo", 1)
    node = rank // (world // 2)
    return Host(rank, world, _namespace(node), _end(node), 2)


def _namespace(node: int) -> str:
    return f"shoal-{os.getpid()}-{node}"


def _end(node: int) -> str:
    return f"shoal{node}"


@contextmanager
def joined(rate: float | None) -> Iterator[None]:
    """Two namespaces with a veth pair of ``rate`` bytes per second each way; nothing for None. As root."""
    if rate is None:
        yield
        return
    try:
        for node in (0, 1):
            _run("ip", "netns", "add", _namespace(node))
        _run("ip", "-n", _namespace(0), "link", "add", _end(0), "type", "veth", "peer", "name", _end(1),
             "netns", _namespace(1))  # fmt: skip
        for node in (0, 1):
            inside = ("ip", "-n", _namespace(node))
            _run(*inside, "address", "add", f"10.83.0.{node + 1}/24", "dev", _end(node))
            _run(*inside, "link", "set", _end(node), "up")
            _run(*inside, "link", "set", "lo", "up")
            burst = max(16 * 1024, int(rate / 1000))  # what the bucket holds passes at once
            _run("tc", "-n", _namespace(node), "qdisc", "add", "dev", _end(node), "root", "tbf",
                 "rate", f"{rate * 8:.0f}bit", "burst", f"{burst}", "latency", "1s")  # fmt: skip
        yield
    finally:
        for node in (0, 1):
            subprocess.run(("ip", "netns", "delete", _namespace(node)), stderr=subprocess.DEVNULL, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}; run as root, with iproute2, or --links loopback")


# All of it


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All so far, after every world and link: its constants, and each plan's steps."""
    clusters: dict[tuple[int, str], Cluster] = {}
    rows: list[dict[str, Any]] = []
    sketches = {name: sketch_of(name) for name in args.models}
    for link in args.links:
        with joined(LINK_RATES[link]):
            for world in args.worlds:
                workers = Workers(world, link)
                known = clusters.get((world, "loopback"))
                try:
                    first = asked(workers, known, args)
                    runs = [Runs(name, first, sketch, workers, args) for name, sketch in sketches.items()]
                    for each in runs:
                        each.forth()
                    clusters[world, link] = calmer(first, asked(workers, known, args))
                    for each in reversed(runs):
                        rows += [row | {"link": link} for row in each.back()]
                finally:
                    workers.stop()
                constants = [
                    {"world": at[0], "link": at[1], "cluster": cluster.to_toml()} for at, cluster in clusters.items()
                ]
                yield {"batch": args.batch, "constants": constants, "rows": rows, "environment": environment()}


def asked(workers: Workers, known: Cluster | None, args: argparse.Namespace) -> Cluster:
    """The constants of a world. ``known``: a cluster whose device is taken. Ends the program where it fails."""
    found = workers.ask("constants", device=known and known.to_toml(), budget_s=args.budget_s)
    if "error" in found:
        sys.exit(found["error"])
    return Cluster.parse(_toml(found["cluster"]), "constants")


def calmer(one: Cluster, other: Cluster) -> Cluster:
    """Of two measurements the device and each link that were less disturbed: in all, they took less time."""

    def of(part: str, seconds: Callable[[Any], float]) -> Any:
        both = [getattr(cluster, part) for cluster in (one, other)]
        return min(both, key=seconds) if all(both) else both[0]

    device = of("device", lambda device: sum(product.seconds for product in device.products))
    links = {
        part: of(part, lambda link: sum(seconds for fit in link.fits for _, seconds in fit.points))
        for part in ("inside", "between")
    }
    return one.model_copy(update={"device": device, **links})


class Runs:
    """A model's plans on the workers of a world: in their order, and later the fast ones in the other, since a
    machine's rate drifts. Of two runs the faster counts: who else uses the machine only adds time."""

    def __init__(self, name: str, cluster: Cluster, sketch: Sketch, workers: Workers, args: argparse.Namespace) -> None:
        self.name, self.workers, self.args = name, workers, args
        self.search = searches({name: sketch}, cluster, args.batch)[name]
        self.planned = Planned(sketch, cluster, self.search.question, self.search, (), 0, 0)
        self.plans = list(candidates(self.search))
        self.found: list[dict[str, Any]] = [{} for _ in self.plans]

    def forth(self) -> None:
        """Every plan; the first one twice, since processes are new."""
        for number in (0, *range(len(self.plans))):
            self.found[number] = self._run(number)

    def back(self) -> list[dict[str, Any]]:
        """The fast ones again; what came of all of them."""
        for number in reversed(range(len(self.plans))):
            if "error" not in self.found[number] and self._median(number) < SLOW_S:
                again = self._run(number)
                if "error" in again or statistics.median(again["steps_s"]) < self._median(number):
                    self.found[number] = again
        return [
            {"model": self.name, "world": self.search.question.world, "plan": told(plan), **found}
            for plan, found in zip(self.plans, self.found, strict=True)
        ]

    def _median(self, number: int) -> float:
        return statistics.median(self.found[number]["steps_s"])

    def _run(self, number: int) -> dict[str, Any]:
        made = self.plans[number]
        plan, args = self.planned.as_plan(made).model_dump(mode="json"), self.args
        found = self.workers.ask("steps", job=self.name, plan=plan, most=args.steps, budget_s=args.plan_s)
        print(label(told(made)), found.get("error") or f"{statistics.median(found['steps_s']):.4f} s",
              f"said {cost(self.search, made).step_s:.4f} s", file=sys.stderr, flush=True)  # fmt: skip
        return found


def sketch_of(name: str) -> Sketch:
    """A job's sketch, taken in a fork. Ends the program where there is none."""
    found = sketch_apart(JOBS[name](), RunSettings())
    if not isinstance(found, Sketch):
        sys.exit(f"{name}: {found}")
    return found


def _toml(text: str) -> Any:
    return toml.from_toml(text, "constants")


def predicted(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that ran, each with the cost predicted now."""
    names = list(dict.fromkeys(row["model"] for row in raw["rows"]))
    sketches = {name: sketch_of(name) for name in names}
    found = []
    for constant in raw["constants"]:
        cluster = Cluster.parse(_toml(constant["cluster"]), "constants")
        of = searches(sketches, cluster, raw["batch"])
        for row in raw["rows"]:
            if (row["world"], row["link"]) == (constant["world"], constant["link"]) and "steps_s" in row:
                price = cost(of[row["model"]], heard(row["plan"], of[row["model"]]))
                step_s = statistics.median(row["steps_s"])
                found.append({
                    **{name: row[name] for name in ("model", "world", "link")}, "plan": label(row["plan"]),
                    "measured_s": step_s, "predicted_s": price.step_s, "error": price.step_s / step_s - 1,
                    "parts": {name: value for name, value in price._asdict().items() if value},
                })  # fmt: skip
    return found


def label(plan: dict[str, Any]) -> str:
    """A plan in a few words."""
    mesh = ",".join(f"{name}={degree}" for name, degree in plan["mesh"].items())
    more = f" {plan['schedule']}" + (f" x{plan['chunks']}" if plan["chunks"] > 1 else "") if plan["schedule"] else ""
    more += f" level {plan['shard_level']}" if plan["shard_level"] < 3 else ""
    return mesh + more + (" sequence-parallel" if plan["sequence_parallel"] else "")


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b (https://doi.org/10.1093/biomet/33.3.239)."""
    signs = [
        (_sign(a[0] - b[0]), _sign(a[1] - b[1])) for at, a in enumerate(pairs) for b in pairs[at + 1 :]
    ]  # fmt: skip
    left, right = (sum(bool(sign[side]) for sign in signs) for side in (0, 1))
    return sum(a * b for a, b in signs) / math.sqrt(left * right) if left and right else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each model, world and link: plans, errors, tau and regret."""
    found = []
    for key in dict.fromkeys((row["model"], row["world"], row["link"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["world"], row["link"]) == key]
        chosen, best = (min(mine, key=lambda row: row[name]) for name in ("predicted_s", "measured_s"))
        found.append({
            "model": key[0], "world": key[1], "link": key[2], "plans": len(mine), **_errors(mine),
            "tau": tau([(row["predicted_s"], row["measured_s"]) for row in mine]),
            "chosen": chosen["plan"], "best": best["plan"], "regret": chosen["measured_s"] / best["measured_s"] - 1,
        })  # fmt: skip
    return found


def _errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows]
    return {"median_error": statistics.median(errors), "worst_error": max(errors)}


def table(rows: list[dict[str, Any]], of: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a line for each model, world and link."""
    yield "| model | workers | link | plans | median error | worst | tau | chosen | best | regret |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for each in of:
        yield (
            f"| {each['model']} | {each['world']} | {each['link']} | {each['plans']} | {each['median_error']:.1%} | "
            f"{each['worst_error']:.1%} | {each['tau']:.2f} | {each['chosen']} | {each['best']} | "
            f"{each['regret']:.1%} |"
        )
    if mine := [row for row in rows if row["model"] in NEW]:
        yield _total("new models", mine, [each for each in of if each["model"] in NEW])
    yield _total("all", rows, of)


def _total(name: str, rows: list[dict[str, Any]], of: list[dict[str, Any]]) -> str:
    everything = _errors(rows)
    return (
        f"| {name} | | | {len(rows)} | {everything['median_error']:.1%} | {everything['worst_error']:.1%} | "
        f"{statistics.median(each['tau'] for each in of):.2f} (median) | | | "
        f"{max(each['regret'] for each in of):.1%} (worst) |"
    )


def _new(rows: list[dict[str, Any]], of: list[dict[str, Any]]) -> dict[str, float] | None:
    """Of the models alone that no constant was fitted on; None: there are none."""
    mine, each = ([one for one in both if one["model"] in NEW] for both in (rows, of))
    if not mine:
        return None
    return {
        **_errors(mine), "median_tau": statistics.median(one["tau"] for one in each),
        "worst_tau": min(one["tau"] for one in each), "worst_regret": max(one["regret"] for one in each),
    }  # fmt: skip


def environment() -> dict[str, Any]:
    """What it ran on."""
    return {
        "cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0],
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=JOBS, default=[name for name in JOBS if name not in NEW])
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--links", nargs="+", choices=LINK_RATES, default=list(LINK_RATES))
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a plan")
    parser.add_argument("--plan-s", type=float, default=2.0, help="seconds after which a plan has run enough steps")
    parser.add_argument("--budget-s", type=float, default=40.0, help="seconds for the constants of a world and link")
    parser.add_argument("--raw", help="a file for what was measured")
    parser.add_argument("--from", dest="sources", nargs="+", help="such files, in place of measuring")
    parser.add_argument("--every", action="store_true", help="print every plan too")
    parser.add_argument("--plot", help="a picture of predicted over measured steps, .svg or .html")
    return parser.parse_args()


def together(paths: Sequence[str]) -> dict[str, Any]:
    """What was measured in several calls, of one batch on one machine."""
    read = [json.loads(Path(path).read_text()) for path in paths]
    return {**read[0], **{name: [each for one in read for each in one[name]] for name in ("constants", "rows")}}


def panels(rows: Sequence[dict[str, Any]]) -> Iterator[picture.Panel]:
    """Predicted over measured steps, a chart for each world."""
    for world in sorted({row["world"] for row in rows}):
        pairs: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["world"] == world:
                pairs.setdefault(row["model"], []).append((row["measured_s"], row["predicted_s"]))
        yield picture.against(f"{world} workers, seconds of a step: predicted over measured", "s", pairs)


def main() -> None:
    """Measure or read, predict, compare."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # namespaces go on the way out
    for raw in [together(args.sources)] if args.sources else measured(args):
        if args.raw:
            Path(args.raw).write_text(json.dumps(raw))
    rows = predicted(raw)
    of = groups(rows)
    if args.every:
        for row in rows:
            parts = " ".join(f"{name[:-2]} {value:.3f}" for name, value in row["parts"].items())
            print(f"{row['model']:6} {row['world']} {row['link']:10} {row['plan']:40} {row['measured_s']:.4f} "
                  f"{row['predicted_s']:.4f} {row['error']:+.0%}  {parts}")  # fmt: skip
    print("\n".join(table(rows, of)))
    if args.plot:
        picture.save(picture.drawn(list(panels(rows))), args.plot, "this machine", "\n".join(table(rows, of)))
    failed = [{**row, "plan": label(row["plan"])} for row in raw["rows"] if "error" in row]
    print(json.dumps({
        **_errors(rows), "median_tau": statistics.median(each["tau"] for each in of),
        "worst_tau": min(each["tau"] for each in of), "worst_regret": max(each["regret"] for each in of),
        "new": _new(rows, of), "groups": of, "failed": failed, "environment": raw["environment"],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
