"""``shoal verify FILE [field=value ...] (--mesh | --plan | --world)``: does a layout compute what one device does?"""

import json
import sys
from typing import Annotated, Any

import typer

from shoal.cli.flags import File, Json, Overrides, given, with_flags
from shoal.cli.loading import loading, told

HELP = "Train the Job in FILE on one device and under a layout, and compare every loss, gradient and weight."
#: Settings of the run that count here, with what is said of their defaults where it is not the run's own.
FLAGS = {
    "mesh": "", "plan": "", "schedule": "", "chunks": "", "sequence_parallel": "", "shard_level": "",
    "recompute": "", "cpu_offload": "",
    "global_batch": "", "micro_batch": "", "clip": "", "precision": "fp64", "steps": "3", "seed": "",
}  # fmt: skip


def command(
    file: File,
    overrides: Overrides = None,
    *,
    world: Annotated[
        int | None, typer.Option(help="every way to lay out so many ranks over pipeline, replicate, shard, tensor")
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Run the command. Exit status: 0 where nothing is different or broken, else 1."""
    with loading():
        from shoal.verify import verify_file

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with told():
        report = verify_file(file, overrides or [], world, given(flags), tell)
    report.print()
    if as_json:
        print(json.dumps(report.as_json()), flush=True)
    raise SystemExit(not report.ok)


with_flags(command, FLAGS)
