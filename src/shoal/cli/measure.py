"""``shoal measure [-o cluster.toml]``: how fast this machine, or the world that is there, computes and communicates."""

import json
from typing import Annotated

import typer

from shoal.cli.loading import told

HELP = "Measure this machine, or the world that torchrun or SLURM set up: products, memory, collectives, disk."


def command(
    *,
    out: Annotated[str | None, typer.Option("-o", "--out", help="TOML file to write", metavar="FILE")] = None,
    workers: Annotated[
        int | None, typer.Option(help="worker processes (default: every GPU; without one the CPU's cores, up to 2)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")] = False,
    plot: Annotated[
        str | None, typer.Option(help="picture of the measured points against their fits", metavar="FILE.html|FILE.svg")
    ] = None,
    folder: Annotated[str, typer.Option(help="on the disk that checkpoints go to", metavar="FOLDER")] = ".",
) -> None:
    """Run the command. Exit status: 0 measured, else 1."""
    from shoal.cluster.page import page
    from shoal.launch.measure import measure
    from shoal.launch.world import find_world

    with told():
        world = find_world()
        cluster = measure(workers=workers, out=out, plot=plot, folder=folder, quiet=False)
    if world is not None and world.rank:
        return
    print(page(cluster), flush=True)
    if as_json:
        print(json.dumps(cluster.model_dump(mode="json")), flush=True)
