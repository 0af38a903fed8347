"""Named values, nested to any depth: merged onto defaults, texts read by declared type, unknown names refused."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from shoal.core.errors import nearest


class Text(str):
    """A value as it was typed, to be read by the type that its field declares."""


_BAD = object()  # a value that is on the list of faults already


def fill(cls: type[BaseModel], values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Arguments for ``cls`` from nested ``values``, and every fault found; a name without a good value is left out.

    A mapping for a field that holds named values (a pydantic model, a dataclass, a TypedDict, a dict) is merged onto
    the field's default, at every depth. ``where`` names the values' origin in the faults.
    """
    reader = _Reader(where)
    defaults = {name: _default(field) for name, field in cls.model_fields.items()}
    again: dict[str, Any] = {}
    for name, default in defaults.items():  # what a nested default holds is checked like anything else
        if _is_record(type(default)) and name not in values and not _renamed(type(default)):
            made = reader.value(type(default), default, {}, name)
            again.update({name: made} if made is not _BAD and made != default else {})
    types_of = {name: field.annotation for name, field in cls.model_fields.items()}
    ready = {**again, **reader.named(cls.__name__, types_of, defaults, values, "")}
    return ready, reader.faults


def faults_of(error: ValidationError, cls: Any, where: str, path: str = "", skip: Collection[str] = ()) -> list[str]:
    """Each fault that pydantic found: where, name, value, expected type, reason; ``skip``: names not to speak of."""
    return [_fault(cls, where, path, item) for item in error.errors() if not {*item["loc"][:1]} & {*skip}]


def nest(pairs: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """``("a.x", 5)`` -> ``{"a": {"x": 5}}``; and a fault for every name that is given twice."""
    nested: dict[str, Any] = {}
    faults = []
    for name, value in pairs:
        *outer, last = name.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                break
        if not isinstance(place, dict) or last in place:
            faults.append(f"{name!r} is given twice, by itself or as part of another; give it once")
            continue
        place[last] = dict(value) if isinstance(value, Mapping) else value
    return nested, faults


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"a": {"x": 5}}`` -> ``("a.x", 5)``."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class _Reader:
    """Reads values for one origin and gathers what is wrong with them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.faults: list[str] = []

    def named(
        self, owner: str, types_of: Mapping[str, Any], defaults: Mapping[str, Any], values: Mapping[str, Any], path: str
    ) -> dict[str, Any]:
        """The good ones of ``values``; ``types_of`` has all names there are."""
        ready = {}
        for name, value in values.items():
            if name not in types_of:
                hint = nearest(str(name), types_of)
                self.faults.append(f"{self.where}: no field '{path}{name}' in {owner}; {hint}")
                continue
            made = self.value(types_of[name], defaults.get(name), value, f"{path}{name}")
            if made is not _BAD:
                ready[name] = made
        return ready

    def value(self, annotation: Any, default: Any, value: Any, path: str) -> Any:
        """One value for ``annotation``, built from its parts where it has any; _BAD where it cannot be."""
        kinds = list(_kinds(annotation))
        if isinstance(value, Text):
            value = self._text(kinds, default, value, path)
        if isinstance(value, list | tuple) and (items := [get_args(kind)[0] for kind in kinds if _is_list(kind)]):
            made = [self.value(items[0], None, item, f"{path}.{number}") for number, item in enumerate(value)]
            return _BAD if any(item is _BAD for item in made) else made
        if not isinstance(value, Mapping):
            return value
        records = [kind for kind in (type(default), *kinds) if _is_record(kind)]
        if records:
            fits = [kind for kind in records if value.keys() <= _types(kind).keys()]
            return self._record(fits[0] if fits else records[0], default, value, path)
        mappings = [kind for kind in kinds if isinstance(get_origin(kind) or kind, type)]
        if isinstance(default, dict) or any(issubclass(get_origin(kind) or kind, Mapping) for kind in mappings):
            return self._mapping(kinds, default, value, path)
        return value

    def _record(self, kind: Any, default: Any, value: Mapping[str, Any], path: str) -> Any:
        known = _types(kind)
        inner = {name: getattr(default, name) for name in known} if type(default) is kind else _defaults(kind)
        base = inner if type(default) is kind else {}
        if is_typeddict(kind) and isinstance(default, dict):
            base = inner = default
        before = len(self.faults)
        ready = {**base, **self.named(kind.__name__, known, inner, value, f"{path}.")}
        bad = {name for name in value if name not in ready}
        try:
            return TypeAdapter(kind).validate_python(ready)
        except ValidationError as error:
            self.faults += faults_of(error, kind, self.where, f"{path}.", skip=bad)
        finally:
            failed = len(self.faults) > before
        return _BAD if failed or bad else ready

    def _mapping(self, kinds: list[Any], default: Any, value: Mapping[str, Any], path: str) -> Any:
        """A dict's entries; where its default has some, they are all the names there are."""
        base = dict(default) if isinstance(default, Mapping) else {}
        inner = next((get_args(kind)[1] for kind in kinds if len(get_args(kind)) == 2), Any)
        names = base if base else value
        made = self.named(
            "this dict (one with {} as default takes any)", dict.fromkeys(names, inner), base, value, f"{path}."
        )
        return {**base, **made}

    def _text(self, kinds: list[Any], default: Any, text: Text, path: str) -> Any:
        """What a typed text stands for: None, JSON, a comma-separated list, or the first type that takes it."""
        plain = str(text)
        if Any in kinds or object in kinds:
            kinds = [type(default)] if default is not None else [str]
        if type(None) in kinds and plain.lower() in ("none", "null"):
            return None
        for choice in (each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)):
            if str(choice) == plain:
                return choice
        scalars = [kind for kind in kinds if kind in (bool, int, float)]
        parted = any(_is_record(kind) or _is_container(kind) for kind in kinds)
        if parted and plain.lstrip()[:1] in ("{", "["):
            try:
                return json.loads(plain)
            except ValueError as error:
                self.faults.append(
                    f'{self.where}: {path} = {plain!r} is not JSON: {error}; write for example {{"x": 1}}'
                )
                return _BAD
        if any(_is_list(kind) or kind in (list, tuple, set, frozenset) for kind in kinds):
            return [part.strip() for part in plain.split(",")] if plain else []
        for kind in scalars:
            try:
                return TypeAdapter(kind).validate_python(plain)
            except ValidationError as error:
                if len(kinds) == 1:
                    reason = error.errors()[0]["msg"]
                    self.faults.append(f"{self.where}: {path} = {plain!r} (expected {kind.__name__}): {reason}")
                    return _BAD
        return plain


def _kinds(annotation: Any) -> Iterator[Any]:
    """The members of a union; the type inside ``Annotated``."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    else:
        yield annotation


def _is_record(kind: Any) -> bool:
    """Whether a type has fields with names."""
    return isinstance(kind, type) and (
        issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind) or is_typeddict(kind)
    )


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, set, frozenset)


def _is_container(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping | list | tuple | set | frozenset)


def _types(kind: Any) -> dict[str, Any]:
    """Name -> type of a record's fields."""
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    hints = get_type_hints(kind)
    return hints if is_typeddict(kind) else {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _defaults(kind: Any) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {name: _default(field) for name, field in kind.model_fields.items()}
    if is_typeddict(kind):
        return {}
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING or callable(field.default_factory)
    }


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _renamed(kind: Any) -> bool:
    """Whether values cannot be handed over by the names of the fields."""
    fields = getattr(kind, "model_fields", {})
    return any(field.alias or field.validation_alias for field in fields.values())


def _fault(cls: Any, where: str, path: str, item: Any) -> str:
    name = path + ".".join(str(part) for part in item["loc"])
    known = _types(cls)
    annotation = known.get(str(item["loc"][0])) if item["loc"] else None
    expected = f" (expected {_type_name(annotation)})" if annotation is not None else ""
    if item["type"] == "missing":
        return f"{where}: {name}{expected} is missing; give it a value"
    return f"{where}: {name.rstrip('.') or cls.__name__} = {item['input']!r}{expected}: {item['msg']}"


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
