"""``shoal train FILE [field=value ...]``: flags are the fields of RunSettings."""

import inspect
import json
import sys
from typing import Annotated, Any

import typer

from shoal.cli.loading import loading
from shoal.engine.settings import RunSettings

HELP = "Train the Job in FILE on every worker of this machine, or in the world that torchrun or SLURM set up."


def flags_of(defaults: dict[str, str]) -> list[inspect.Parameter]:
    """A keyword flag per named field of RunSettings; None: not given. ``defaults``: the command's own, where not ""."""
    found = []
    for name, own in defaults.items():
        field = RunSettings.model_fields[name]
        flag = "--" + name.replace("_", "-")
        kind: Any = field.annotation
        shown = (
            ""
            if field.default is None
            else f" (default: {' '.join(field.default) if isinstance(field.default, tuple) else field.default})"
        )
        text = (
            (field.description or "").partition(" (default:")[0] + f" (default: {own})"
            if own
            else (field.description or "") + shown
        )
        if kind is bool:
            annotation: Any = Annotated[bool | None, typer.Option(flag, help=text)]
        elif name == "sinks":
            annotation = Annotated[list[str] | None, typer.Option(flag, help=text)]
        else:
            annotation = Annotated[str | None, typer.Option(flag, help=text, metavar=_metavar(kind))]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


def _metavar(kind: Any) -> str:
    text = str(kind)
    if "Literal" in text:
        return text[text.index("[") + 1 : text.index("]")].replace("'", "").replace(", ", "|")
    return "N" if "int" in text else "X" if "float" in text else "TEXT"


def command(
    file: Annotated[str, typer.Argument(help="Python file with a Job", metavar="FILE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="fields of the job", metavar="[FIELD=VALUE ...]")
    ] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(help="worker processes (default: every GPU; without one the CPU's cores, up to 2)"),
    ] = None,
    restarts: Annotated[int, typer.Option(help="how often dead workers are started again")] = 0,
    port: Annotated[int | None, typer.Option(help="port of the workers' rendezvous (default: any free one)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")] = False,
    **flags: Any,
) -> None:
    """Run the command. Exit status: 0 finished, 75 stopped on request after saving, else failed."""
    with loading():
        from shoal.core.errors import ShoalError
        from shoal.launch.train import Launch, run_file

    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        status, summary = run_file(file, overrides or [], given, Launch(workers, restarts, port, quiet=as_json))
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if as_json and summary is not None:
        print(json.dumps(summary), flush=True)
    raise SystemExit(status)


_signature = inspect.signature(command)
_flags = flags_of(dict.fromkeys(RunSettings.model_fields, ""))
command.__signature__ = _signature.replace(  # type: ignore[attr-defined]  # typer reads flags from the signature
    parameters=[p for p in _signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD] + _flags
)
command.__annotations__.update({p.name: p.annotation for p in _flags})
