"""``shoal rehearse FILE [field=value ...] (--plan | --mesh)``: one rank of any world, run here without its devices."""

import json
from typing import Annotated, Any

import typer

from shoal.cli.flags import File, Json, Overrides, given, with_flags
from shoal.cli.loading import loading, told

HELP = "Run a step of the Job in FILE as one rank of any world, here: peak memory, collectives, FLOPs, and predictions."
#: Settings of the run that count here.
FLAGS: dict[str, str] = dict.fromkeys(
    ("mesh", "plan", "schedule", "chunks", "sequence_parallel", "shard_level", "recompute", "cpu_offload",
     "global_batch", "micro_batch", "clip", "precision", "ema", "bucket_mb", "compress", "seed"), "",
)  # fmt: skip


def command(
    file: File,
    overrides: Overrides = None,
    *,
    rank: Annotated[int | None, typer.Option(help="which rank (default: 0)", min=0)] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="one rank of each kind (the others are like one of them), or some", metavar="distinct|R,R"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="whose devices are meant: a preset, or a TOML file", metavar="NAME|FILE")
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Run the command."""
    with loading():
        from shoal.verify.rehearsal import rehearse

    with told():
        found = rehearse(file, fields=overrides or [], rank=rank, ranks=ranks, cluster=cluster, **given(flags))
    found.print()
    if as_json:
        print(json.dumps(found.as_json()), flush=True)


with_flags(command, FLAGS)
