"""The settings of a model as text: key, type, default and meaning, for `--help` and `docs/settings.md`."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .strict import Place, Size

TYPES: dict[Any, str] = {str: "text", int: "integer", float: "number", list: "list", dict: "object", tuple: "list"}

NAMED = {get_args(kind)[1]: name for kind, name in ((Size, "size"), (Place, "path"))}
"""Type names, by the validator that makes them."""

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

LARGEST_SHOWN = 2**53
"""Bounds of 64 bits don't help a reader."""

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True, slots=True)
class Described:
    """A setting: its key (`tokenizer.model`), default (None: unset), values that it takes, and meaning."""

    key: str
    default: str | None
    required: bool
    values: str
    meaning: str


def describe(model: type[BaseModel], without: Collection[str] = (), prefix: str = "") -> Iterator[Described]:
    """Yield a model's settings, its own before inherited ones; settings of the models within it by their path."""
    ancestry = model.__mro__ if not prefix else ()
    own = [name for owner in ancestry for name in getattr(owner, "__annotations__", {}) if name in model.model_fields]
    for name in dict.fromkeys([*own, *model.model_fields]):
        field, key = model.model_fields[name], prefix + name
        inner: list[Any] = [each for each in get_args(field.annotation) or [field.annotation] if each is not type(None)]
        if key in without:
            continue
        if len(inner) == 1 and _is_model(inner[0]):
            group = describe(inner[0], without, f"{key}.")
            if field.is_required() or _default(field) not in {None, "[]"}:
                yield from group
                continue
            # The group is off until one is set: the first mentions this, and none is required without the others.
            for number, each in enumerate(group):
                required = f" Required within {key}." if each.required else ""
                off = "" if number else f" {key} is off unless set."
                yield replace(each, required=False, meaning=f"{each.meaning}{required}{off}")
        else:
            bounds = [
                f"{sign} {bound}"
                for each in field.metadata
                for name, sign in SIGNS.items()
                if (bound := getattr(each, name, None)) is not None and bound < LARGEST_SHOWN
            ]
            types = dict.fromkeys(_types(field.annotation, field.metadata))
            values = f"{', '.join(types)} {' and '.join(bounds)}".strip()
            yield Described(key, _default(field), field.is_required(), values, field.description or "")


def example_of(settings: Iterable[Described]) -> str:
    """Return the first setting with a default, as an override."""
    return next(f"{each.key}={each.default}" for each in settings if each.default)


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default(field: FieldInfo) -> str | None:
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "size" in _types(field.annotation, field.metadata):
        # As a setting takes it, exactly: 256MB, or 1234567.
        return next((f"{value // unit}{name}" for name, unit in UNITS if value and value % unit == 0), str(value))
    return None if value is None else str(value)


def _types(annotation: Any, metadata: Collection[Any] = ()) -> Iterator[str]:  # noqa: ANN401 - any annotation
    """The names of the types in an annotation, and the values of its literals."""
    named = [name for validator, name in NAMED.items() if validator in metadata]
    origin, parts = get_origin(annotation), get_args(annotation)
    if named:
        yield from named
    elif annotation is bool:
        yield from ("true", "false")
    elif origin is Literal:
        yield from map(str, parts)
    elif getattr(annotation, "__metadata__", None):
        yield from _types(parts[0], annotation.__metadata__)
    elif origin is Union or (origin is not None and origin not in TYPES):
        yield from (name for part in parts if part is not type(None) for name in _types(part))
    else:
        yield "object" if _is_model(annotation) else TYPES.get(origin or annotation, "text")
