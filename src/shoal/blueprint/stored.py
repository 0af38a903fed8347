"""A model's blueprint in a file, with what else a plan needs of the job: read again without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from shoal.blueprint.facts import Blueprint, Kept, Operation, Parameter, Ref, Storage, Timeline, Touch, Value
from shoal.core.errors import ConfigError
from shoal.core.fields import faults_of
from shoal.core.settings import Settings
from shoal.core.toml import read_text, write_text

#: Counted up when the file's form changes.
FORMAT = 3


class Sketch(Settings):
    """What a plan needs to know of a job: its model, traced on a micro-batch, its data's length, its own settings."""

    name: str = Field(description="of the job: its file's module and class")
    blueprint: Blueprint = Field(description="of one micro-batch; without operations where it could not be traced")
    units: tuple[str, ...] = Field(description="modules before which a stage may begin")
    precision: str = Field(default="fp32", description="that it was traced in")
    global_batch: int = Field(default=32, ge=1, description="the job's own, samples")
    clip: float | None = Field(default=None, description="the job's own largest gradient norm")
    dataset_samples: int | None = Field(default=None, description="samples in an epoch; None: not told by the data")
    optimizer_bytes: float = Field(default=8, ge=0, description="of optimizer state per parameter")
    notes: tuple[str, ...] = Field(default=(), description="what is not known, in sentences")

    @property
    def parameters(self) -> int:
        """Numbers in the model's weights, tied ones once."""
        return sum(_numel(p.shape) for p in self.blueprint.parameters if not p.buffer)

    def write(self, path: str | Path) -> None:
        """Write it as JSON, over what was there; folders on the way are made. Raises ConfigError."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "blueprint"}
        blueprint = {name: _out(getattr(self.blueprint, name)) for name in Blueprint.model_fields}
        values |= {"format": FORMAT, "blueprint": blueprint}
        write_text(path, json.dumps(values, separators=(",", ":")), folders=True)

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
        except ValidationError as error:
            told = "; ".join(faults_of(error, cls, str(path)))
            raise ConfigError(f"{told}; give a file that shoal plan --save-blueprint wrote") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no blueprint: {type(error).__name__}: {str(error).splitlines()[0]}; give a file that shoal "
                "plan --save-blueprint wrote"
            ) from None


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _blueprint(values: dict[str, Any]) -> Blueprint:
    made = {name: _in(value) for name, value in values.items() if name != "modules"}
    if not (isinstance(made["samples"], int) and made["samples"] > 0):
        raise ValueError(f"samples = {made['samples']!r} of the traced micro-batch")
    made["values"] = tuple(Value(*each) for each in made["values"])
    made["parameters"] = tuple(Parameter(*each) for each in made["parameters"])
    for name in ("operations", "loss"):
        made[name] = tuple(_operation(each) for each in made[name])
    if made["timeline"] is not None:
        storages, *others = made["timeline"]
        made["timeline"] = Timeline(tuple(Storage(*each) for each in storages), *others)
    return Blueprint.model_construct(**made, modules=values["modules"])


def _operation(values: tuple[Any, ...]) -> Operation:
    made = Operation(*values)
    kept, touches = (tuple(Kept(*each) for each in made.kept), tuple(Touch(*each) for each in made.touches))
    return made._replace(kept=kept, touches=touches)


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
