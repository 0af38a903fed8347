"""``shoal checkpoint list|verify|export RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.loading import loading, told

app = typer.Typer(help="Look at, check and export a run's checkpoints.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder (its --out)")]


@app.command("list")
def show(run: Folder) -> None:
    """List the checkpoints of RUN, newest first."""
    with loading():
        from shoal.checkpoint import list_checkpoints

    with told():
        for found in list_checkpoints(run):
            typer.echo(f"step {found.step}  {found.path}" + (f"  BROKEN: {found.problem}" if found.problem else ""))


@app.command()
def verify(run: Folder) -> None:
    """Read every byte of RUN's checkpoints and compare with its checksum; exit status 1 if one is broken."""
    with loading():
        from shoal.checkpoint import verify_checkpoints

    broken = False
    with told():
        for found in verify_checkpoints(run):
            broken |= found.problem is not None
            typer.echo(f"step {found.step}  {found.problem or 'good'}")
    raise SystemExit(int(broken))


@app.command()
def export(
    run: Folder,
    to: Annotated[Path, typer.Option(help="folder to write model.safetensors into")],
    step: Annotated[int | None, typer.Option(help="which checkpoint (default: the newest good one)")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64 (default: as stored)")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="the averaged weights")] = False,
) -> None:
    """Write the weights of RUN under the model's own names, as safetensors."""
    with loading():
        from shoal.checkpoint import export as export_checkpoint

    with told():
        typer.echo(str(export_checkpoint(run, to, step=step, dtype=dtype, ema=ema)))
