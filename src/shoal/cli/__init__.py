"""The command line: one file per command, no logic; each command has a Python call beside it."""

from __future__ import annotations

import typer

from shoal.cli import checkpoint, measure, plan, rehearse, train, verify

app = typer.Typer(
    name="shoal",
    help="Train any PyTorch model on many devices: the same numbers in every layout, nothing lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train", help=train.HELP)(train.command)
app.command("verify", help=verify.HELP)(verify.command)
app.command("plan", help=plan.HELP)(plan.command)
app.command("rehearse", help=rehearse.HELP)(rehearse.command)
app.command("measure", help=measure.HELP)(measure.command)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Entry point of the ``shoal`` program."""
    app()
