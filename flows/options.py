"""Command-line input as settings: a YAML file, then options, then `key.sub=value`; later ones win.

All of it is parsed by the same model as a flow's parameters, so a misspelt key is an error wherever it is written.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from cyclopts import Parameter
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.described import describe, example_of
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.settings import PreparationSettings, Scale
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.yaml_text import read_mapping, read_yaml

from .terminal import terminal


@Parameter(name="*")
@dataclass(frozen=True)
class CommonOptions:
    """Options of every preparation."""

    config: Annotated[Path | None, Parameter(help="YAML file with settings.")] = None
    scale: Annotated[Scale | None, Parameter(help="Leading share of each dataset.")] = None
    sample: Annotated[int | None, Parameter(help="Leading rows of each dataset.")] = None
    force: Annotated[bool | None, Parameter(negative="", help="Build every shard again.")] = None
    workers: Annotated[int | None, Parameter(help="Worker processes.")] = None
    cluster: Annotated[
        str | None, Parameter(help="local, a Dask scheduler's address, or a YAML file with a profile.")
    ] = None


JINJA = ("{{", "{%", "{#")
"""The first characters of Jinja text; a value that begins with them is text, not YAML."""

Settings = TypeVar("Settings", bound=PreparationSettings)
Choices = TypeVar("Choices", bound=Strict)


GIVEN = "settings"
"""The name in messages for settings that don't come from a file."""


def settings_of(kind: type[Settings], options: CommonOptions, overrides: Sequence[str]) -> Settings:
    """The settings of a preparation. Raises InputError for anything unknown or out of bounds."""
    given = {
        "scale": options.scale, "sample": options.sample, "force": options.force,
        "workers": options.workers, "cluster": options.cluster,
    }  # fmt: skip
    chosen = [f"{name}={value}" for name, value in given.items() if value is not None]
    written = config_settings(options.config) if options.config else {}
    return choices_of(kind, [*chosen, *overrides], written, str(options.config or GIVEN))


def choices_of(
    kind: type[Choices], overrides: Sequence[str], under: Mapping[str, Any] | None = None, where: str = GIVEN
) -> Choices:
    """Return settings for any model: overrides over settings written `under` them. Raises InputError as `settings_of` does."""
    merged = dict(under or {})
    for override in overrides:
        merged = _merge(merged, _override(override, kind))
    found = parse(kind, merged, f"{where} and the command line" if overrides and where != GIVEN else where)
    if under:
        _print_differences(kind, under, merged, where)
    return found


def _print_differences(kind: type[Strict], written: Mapping[str, Any], merged: Mapping[str, Any], where: str) -> None:
    """Print the settings of a file that differ from the defaults, except those that the command line replaced."""
    defaults = {each.key: each.default for each in describe(kind)}
    used = dict(_leaves(merged, defaults))
    differing = [
        f"{key}={value} (default {defaults.get(key) or 'none'})"
        for key, value in _leaves(written, defaults)
        if used.get(key) == value != (defaults.get(key) or "null")
    ]
    if differing:
        terminal.print(f"{where}: {', '.join(differing)}", markup=False, highlight=False, soft_wrap=True)


def _leaves(written: Mapping[str, Any], known: Collection[str], group: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings with their value as text, with the path of groups: `tokenizer.model`."""
    for name, value in written.items():
        if isinstance(value, Mapping) and f"{group}{name}" not in known:
            yield from _leaves(cast("Mapping[str, Any]", value), known, f"{group}{name}.")
        else:
            yield f"{group}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def source_keys(kind: type[Strict], names: Iterable[str]) -> list[str]:
    """Return the `names` that are keys of a dataset, not settings: `text_field` and others."""
    return [
        name for name in names if name in DataSource.model_fields and name not in {*kind.model_fields, "name", "path"}
    ]


def sorted_overrides(kind: type[Strict], overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides of settings, and the keys for the dataset of a data file."""
    keys = {text: source_keys(kind, [re.split("[.=]", text, maxsplit=1)[0]]) for text in overrides}
    of_rows: dict[str, Any] = {}
    for text in overrides:
        if keys[text]:
            of_rows = _merge(of_rows, _override(text, DataSource))
    return [text for text in overrides if not keys[text]], of_rows


def config_settings(path: Path) -> dict[str, Any]:
    """The settings in the file of `--config`. Raises InputError."""
    try:
        return read_mapping(path.read_bytes(), f"--config {path}")
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}; check the path") from error


def _override(text: str, kind: type[Strict]) -> dict[str, Any]:
    """`tokenizer.model=x` as `{"tokenizer": {"model": "x"}}`; `null` is None, and lists and objects are YAML.

    `~` is a home folder here, not YAML's null.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"{text!r}: not an override; write key=value, for example {example_of(describe(kind))}")
    nested: Any = None if value.lower() == "null" else _value(text, value)
    for part in reversed(name.split(".")):
        nested = {part: nested}
    return nested


def _value(text: str, value: str) -> Any:  # noqa: ANN401 - anything YAML holds
    if not value.startswith(("[", "{")) or value.startswith(JINJA):
        return value
    return read_yaml(value, f"{text!r}: neither a list nor an object of YAML")


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merge(merged[name], value) if both else value
    return merged
