"""A model's blueprint in a file, with what else a plan needs of the job: read again without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from shoal.blueprint.facts import Blueprint, Operation, Parameter, Ref, Value
from shoal.core.errors import ConfigError
from shoal.core.settings import Settings
from shoal.core.toml import read_text

FORMAT = 1


class Sketch(Settings):
    """What a plan needs to know of a job: its model, traced on a micro-batch, and how much data there is."""

    name: str = Field(description="of the job: its file's module and class")
    blueprint: Blueprint = Field(description="of one micro-batch")
    units: tuple[str, ...] = Field(description="modules before which a stage may begin")
    tokens: int = Field(default=1, ge=1, description="positions of a sample; 1: samples are no sequences")
    dataset_samples: int | None = Field(default=None, description="samples in an epoch; None: not told by the data")
    global_batch: int | None = Field(default=None, description="the job's own, samples; None: not told")
    precision: str | None = Field(default=None, description="the job's own compute precision; None: not told")

    def write(self, path: str | Path) -> None:
        """Write it as JSON, over what was there; folders on the way are made."""
        values = {name: value for name, value in self if name != "blueprint"}
        values |= {"format": FORMAT, "blueprint": {name: _out(value) for name, value in self.blueprint}}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(values, separators=(",", ":")))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """What ``write`` wrote. Raises ConfigError where the file is none of ours."""
        text = read_text(path, "a blueprint")
        try:
            values = json.loads(text)
            found = values.pop("format")
            if found != FORMAT:
                raise ConfigError(
                    f"{path} is a blueprint of format {found!r}, and this version reads {FORMAT}; save it anew with "
                    "shoal plan --save-blueprint"
                )
            return cls(**{**values, "blueprint": _blueprint(values["blueprint"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no blueprint: {type(error).__name__}: {str(error).splitlines()[0]}; give a file that shoal "
                "plan --save-blueprint wrote"
            ) from None


def _blueprint(values: dict[str, Any]) -> Blueprint:
    made = {name: _in(value) for name, value in values.items() if name not in ("modules",)}
    made["values"] = tuple(Value(*each) for each in made["values"])
    made["parameters"] = tuple(Parameter(*each) for each in made["parameters"])
    made["operations"] = tuple(Operation(*each) for each in made["operations"])
    return Blueprint.model_construct(**{**made, "modules": values["modules"]})


def _out(value: Any) -> Any:
    """A value for JSON: a tensor among arguments as an object, so that it is told from a tuple."""
    if isinstance(value, Ref):
        return {"ref": value.of}
    if isinstance(value, tuple):
        return [_out(part) for part in value]
    return value


def _in(value: Any) -> Any:
    if isinstance(value, dict):
        return Ref(value["ref"])
    if isinstance(value, list):
        return tuple(_in(part) for part in value)
    return value
