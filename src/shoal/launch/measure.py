"""``shoal measure`` as a Python call: workers here, or the world that is there; what was measured is kept."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import rich.console
import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from shoal.cluster import cached, picture
from shoal.cluster.facts import Cluster
from shoal.cluster.grid import Grid, grid, quick
from shoal.cluster.machine import processor
from shoal.cluster.measure import measure as measure_world
from shoal.core.errors import ConfigError, WorkerFailure
from shoal.core.toml import check_writable
from shoal.launch.local import run_workers
from shoal.launch.watch import Watch
from shoal.launch.worker import open_beats
from shoal.launch.world import World, device_kind, find_world, join, leave, worker_count


def measure(
    *,
    workers: int | None = None,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    folder: str | Path = ".",
    sizes: Grid | None = None,
    quiet: bool = True,
) -> Cluster:
    """Measure this machine with ``workers`` workers, or the world that torchrun or SLURM set up. Collective there.

    ``out``: a TOML file to write. ``plot``: an SVG or HTML picture of the measured points against their fits.
    ``folder``: on the disk that checkpoints go to. ``sizes``: other shapes and sizes than usual. ``quiet``: no progress
    on stderr. The result is kept for ``kept``. Raises ConfigError, LaunchError, WorkerFailure.
    """
    kind, world = device_kind(), find_world()
    if plot is not None:
        picture.check(plot)
    for path in (out, plot):
        if path is not None:
            check_writable(path)
    if not Path(folder).is_dir():
        raise ConfigError(f"--folder {folder} is no folder; name one on the disk that checkpoints go to")
    chosen = sizes or grid(kind)
    if world is not None:
        if workers not in (None, world.size):
            raise ConfigError(f"--workers {workers} in a world of {world.size} ranks; leave --workers out")
        cluster = _joined(world, kind, chosen, Path(folder), quiet)
        if world.rank:
            return cluster
        count = world.size
    else:
        count = worker_count(workers, kind)
        cluster = _alone(count, kind, chosen, Path(folder), quiet)
    if sizes is None:
        cached.save(cache_folder(), fingerprint(kind, count, cluster.nodes), cluster)
    if out is not None:
        cluster.write(out)
    if plot is not None:
        picture.write(cluster, plot)
    return cluster


def kept(workers: int | None = None, nodes: int = 1) -> cached.Kept | None:
    """The newest measurement of this machine with ``workers`` workers, or of a world of so many on ``nodes`` machines.

    None where there is none. Raises ConfigError for a damaged file.
    """
    kind = device_kind()
    count = workers if workers and nodes > 1 else worker_count(workers, kind)
    return _load(fingerprint(kind, count, nodes))


def fingerprint(kind: str, workers: int, nodes: int = 1) -> dict[str, str]:
    """What a measurement depends on: another value of any of it makes a kept one another machine's."""
    devices = (
        [torch.cuda.get_device_name(number) for number in range(workers // nodes)] if kind == "cuda" else [processor()]
    )
    return {
        "devices": ", ".join(dict.fromkeys(devices)),
        "cores": str(os.cpu_count()),
        "workers": str(workers),
        "nodes": str(nodes),
        "torch": torch.__version__,
        "host": platform.node(),
    }


def kept_quickly(workers: int) -> cached.Kept | None:
    """What ``quickly`` kept, a stand-in until the machine is measured in full; None where it did not."""
    return _load(_quick_fingerprint(workers))


def quickly(workers: int) -> cached.Kept:
    """Measure this machine in a second or two, and keep that; where that cannot be, ``unkept`` of what is returned says
    why. Raises LaunchError, WorkerFailure."""
    kind = device_kind()
    cluster = _alone(workers, kind, quick(kind), Path(), True)
    try:
        return cached.Kept(cluster, cached.save(cache_folder(), _quick_fingerprint(workers), cluster))
    except ConfigError as error:
        return cached.Kept(cluster, Path(), str(error))


def _quick_fingerprint(workers: int) -> dict[str, str]:
    return {**fingerprint(device_kind(), workers), "quick": "yes"}


def cache_folder() -> Path:
    """Where measurements are kept: ``$XDG_CACHE_HOME/shoal/clusters``, by default in ``~/.cache``.

    https://specifications.freedesktop.org/basedir-spec/latest/
    Raises ConfigError for a user without a home.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "shoal" / "clusters"
    try:
        return Path.home() / ".cache" / "shoal" / "clusters"
    except RuntimeError:
        raise ConfigError(
            "the measurement cannot be kept: this user has no home folder; set XDG_CACHE_HOME to a folder"
        ) from None


def _load(found: dict[str, str]) -> cached.Kept | None:
    try:
        folder = cache_folder()
    except ConfigError:
        return None  # where nothing can be kept, nothing was
    return cached.load(folder, found)


def _joined(world: World, kind: str, sizes: Grid, folder: Path, quiet: bool) -> Cluster:
    """In a world that others set up; a group that was not there before is gone afterwards."""
    ours = not dist.is_initialized()
    place = join(world, kind)
    try:
        with _progress(not quiet and world.rank == 0) as tell:
            return measure_world(place, world.local_rank, sizes, folder, tell)
    finally:
        if ours:
            leave()


def _alone(count: int, kind: str, sizes: Grid, folder: Path, quiet: bool) -> Cluster:
    with tempfile.TemporaryDirectory(prefix="shoal-measure-") as out:
        entry = Entry(kind, sizes, folder.absolute(), Path(out), quiet)
        status = run_workers(entry, count, Path(out), device=kind, watch=Watch(saves=False))
        if status:
            raise WorkerFailure(f"measuring ended with status {status}; the cause is on stderr, above")
        return Cluster.read(Path(out) / "cluster.toml")


@dataclass
class Entry:
    """What each worker runs."""

    kind: str
    sizes: Grid
    folder: Path
    out: Path
    quiet: bool

    def __call__(self, world: World) -> int:
        """One rank. Collective."""
        beats = open_beats(self.out, world)
        place = join(world, self.kind)
        with _progress(not self.quiet and world.rank == 0) as tell:

            def told(part: float, text: str) -> None:
                beats.beat(0, "start")  # a phase whose length says nothing of the next one's
                tell(part, text)

            cluster = measure_world(place, world.local_rank, self.sizes, self.folder, told)
        beats.beat(1, "end")
        if world.rank == 0:
            cluster.write(self.out / "cluster.toml")
        return 0


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr where that is a terminal; drawn between measurements only, so as not to disturb them."""
    console = rich.console.Console(stderr=True)
    columns = (TextColumn("measuring"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("{task.description}"), console=console, auto_refresh=False, transient=True,
        disable=not (shown and console.is_terminal),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=1.0)

        def tell(part: float, text: str) -> None:
            bar.update(task, completed=part, description=text)
            bar.refresh()

        yield tell
