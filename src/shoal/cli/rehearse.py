"""``shoal rehearse FILE [field=value ...] (--plan | --mesh)``: one rank of any world, run here without its devices."""

import inspect
import json
import sys
from typing import Annotated, Any

import typer

from shoal.cli.loading import loading
from shoal.cli.train import flags_of

HELP = "Run a step of the Job in FILE as one rank of any world, here: peak memory, collectives, FLOPs, and predictions."
#: Settings of the run that count here.
FLAGS: dict[str, str] = dict.fromkeys(
    ("mesh", "plan", "schedule", "chunks", "sequence_parallel", "shard_level", "recompute", "cpu_offload",
     "global_batch", "micro_batch", "clip", "precision", "ema", "bucket_mb", "seed"), "",
)  # fmt: skip


def command(
    file: Annotated[str, typer.Argument(help="Python file with a Job", metavar="FILE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="fields of the job", metavar="[FIELD=VALUE ...]")
    ] = None,
    *,
    rank: Annotated[int | None, typer.Option(help="which rank (default: 0)", min=0)] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="one rank of each kind (the others are like one of them), or some", metavar="distinct|R,R"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="whose devices are meant: a preset, or a TOML file", metavar="NAME|FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")] = False,
    **flags: Any,
) -> None:
    """Run the command."""
    with loading():
        from shoal.core.errors import ShoalError
        from shoal.verify.rehearsal import rehearse

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        found = rehearse(file, fields=overrides or [], rank=rank, ranks=ranks, cluster=cluster, **given)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    found.print()
    if as_json:
        print(json.dumps(found.as_json()), flush=True)


_signature = inspect.signature(command)
_flags = flags_of(FLAGS)
command.__signature__ = _signature.replace(  # type: ignore[attr-defined]  # typer reads flags from the signature
    parameters=[p for p in _signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD] + _flags
)
command.__annotations__.update({p.name: p.annotation for p in _flags})
