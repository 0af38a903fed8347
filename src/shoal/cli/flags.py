"""What commands that run a job have in common: the job's file, its fields, and flags for settings of the run."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from shoal.core.fields import Text
from shoal.engine.settings import RunSettings

File = Annotated[str, typer.Argument(help="Python file with a Job", metavar="FILE")]
Overrides = Annotated[list[str] | None, typer.Argument(help="fields of the job", metavar="[FIELD=VALUE ...]")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")]


def with_flags(command: Callable[..., None], defaults: dict[str, str]) -> None:
    """Put a flag for each of ``defaults``' settings in the place of a command's ``**flags``: typer reads signatures."""
    signature, flags = inspect.signature(command), _flags_of(defaults)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    command.__annotations__.update({p.name: p.annotation for p in flags})


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, as typed: their settings say how they are read."""
    found = {name: value for name, value in flags.items() if value not in (None, [])}
    return {name: Text(value) if isinstance(value, str) else value for name, value in found.items()}


def _flags_of(defaults: dict[str, str]) -> list[inspect.Parameter]:
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
        return text.partition("Literal[")[2].partition("]")[0].replace("'", "").replace(", ", "|")
    return "N" if "int" in text else "X" if "float" in text else "TEXT"
