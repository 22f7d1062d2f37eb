"""Command-line input as settings: a YAML file, then options, then `key.sub=value`; later ones win.

All of it is parsed by the same model as a flow's parameters, so a misspelt key is an error in each of these places.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import orjson
from cyclopts import Group, Parameter
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions
from tokenmill.tasks.artifact import Artifact, read_artifact
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.described import describe, example_of
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.settings import PreparationSettings, Scale
from tokenmill.tasks.storage import absolute, is_writable, join, temporary_folder
from tokenmill.tasks.strict import Strict, parse
from tokenmill.tasks.yaml_text import read_mapping, read_yaml

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
    "DASK_LOGGING__DISTRIBUTED": "error",
}
"""Settings for use at a terminal: a progress line instead of two log streams, and no telemetry."""

terminal = Console(stderr=True)

OutputDir = Annotated[str, Parameter(name=["--output-dir", "-o"], help="Output folder or URI.")]

TextFormat = Literal["json", "text"]
"""How a command prints its result: one line of JSON for programs, text for people."""

Format = Literal[TextFormat, "table"]
"""The same, and a table for people."""


def be_quiet() -> None:
    """Keep log streams off the terminal. Variables that are already set are kept."""
    chosen, home = dict(QUIET), absolute("~/.prefect")
    if not is_writable(home):  # then Prefect gets a temporary one; the user's profiles remain in use
        chosen["PREFECT_HOME"] = join(temporary_folder(), "prefect")
        profiles = join(home, "profiles.toml")
        if Path(profiles).exists():
            chosen["PREFECT_PROFILES_PATH"] = profiles
    os.environ.update({name: value for name, value in chosen.items() if name not in os.environ})


def piped(command: str, kinds: Collection[str] = ()) -> Artifact:
    """Return the artifact printed by the previous command. Raises InputError unless there is one of these `kinds`."""
    if sys.stdin.isatty():
        raise InputError(f"{command}: name an output folder, or pipe a command into this one")
    return read_artifact(sys.stdin.buffer.read(), kinds, command)


def print_json(record: Mapping[str, Any]) -> None:
    """Print a record as one line for the next program."""
    sys.stdout.write(orjson.dumps(record).decode() + "\n")


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
"""The name in messages for settings that aren't from a file."""


def settings_of(kind: type[Settings], options: CommonOptions, overrides: Sequence[str]) -> Settings:
    """Return the settings of a preparation. Raises InputError for anything unknown or out of bounds."""
    given = {name: value for name, value in vars(options).items() if name != "config" and value is not None}
    chosen = [f"{name}={value}" for name, value in given.items()]
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
    if under:  # show the settings of a file that differ from the defaults, unless the command line replaced them
        defaults = {each.key: each.default for each in describe(kind)}
        used = dict(_leaves(merged, defaults))
        differing = [
            f"{key}={value} (default {defaults.get(key) or 'none'})"
            for key, value in _leaves(under, defaults)
            if used.get(key) == value != (defaults.get(key) or "null")
        ]
        if differing:
            terminal.print(f"{where}: {', '.join(differing)}", markup=False, highlight=False, soft_wrap=True)
    return found


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
    """Return the settings in the file of `--config`. Raises InputError."""
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
    nested: Any = None if value.lower() == "null" else value
    if value.startswith(("[", "{")) and not value.startswith(JINJA):
        nested = read_yaml(value, f"{text!r}: neither a list nor an object of YAML")
    for part in reversed(name.split(".")):
        nested = {part: nested}
    return nested


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


Source = Callable[[], tuple[type[BaseModel], Collection[str]]]
"""Returns the model of a command's settings, and the settings that it rejects."""


@dataclass(frozen=True)
class SettingsPanel:
    """Prints the settings of a model in place of the one argument that takes them all."""

    source: Source

    def __call__(self, console: Console, options: ConsoleOptions, panel: "HelpPanel") -> None:
        from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel
        from tokenmill.tasks.described import describe, example_of

        settings = list(describe(*self.source()))
        entries = [
            HelpEntry(
                positive_names=(each.key,),
                description=f"{each.meaning} ({each.values})",
                required=each.required,
                default=each.default,
            )
            for each in settings
        ]
        title = f"{panel.title}, for example {example_of(settings)}"
        DefaultFormatter()(console, options, HelpPanel("parameter", title, entries=entries))


def settings_parameter(source: Source) -> Parameter:
    """Return the parameter for the `key=value` arguments of a command, whose help lists the settings."""
    return Parameter(group=Group("Settings, as key=value", help_formatter=SettingsPanel(source)))
