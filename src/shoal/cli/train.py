"""``shoal train FILE [field=value ...]``: flags are the fields of RunSettings."""

import json
from typing import Annotated, Any

import typer

from shoal.cli.flags import File, Json, Overrides, given, with_flags
from shoal.cli.loading import loading, told
from shoal.engine.settings import RunSettings

HELP = "Train the Job in FILE on every worker of this machine, or in the world that torchrun or SLURM set up."


def command(
    file: File,
    overrides: Overrides = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(help="worker processes (default: every GPU; without one the CPU's cores, up to 2)"),
    ] = None,
    restarts: Annotated[int, typer.Option(help="how often dead workers are started again")] = 0,
    port: Annotated[int | None, typer.Option(help="port of the workers' rendezvous (default: any free one)")] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Run the command. Exit status: 0 finished, 75 stopped on request after saving, else failed."""
    with loading():
        from shoal.launch.train import Launch, run_file

    with told():
        status, summary = run_file(file, overrides or [], given(flags), Launch(workers, restarts, port, quiet=as_json))
    if as_json and summary is not None:
        print(json.dumps(summary), flush=True)
    raise SystemExit(status)


with_flags(command, dict.fromkeys(RunSettings.model_fields, ""))
