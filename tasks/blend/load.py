"""Loading a blend from a path, a URI or an object. All mistakes are reported before any data is read.

Relative data paths resolve against the folder of the blend file, so that a blend and its data can move together; in an inline
blend they resolve against the working directory.
"""

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from pydantic import JsonValue
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.storage import ART, absolute, filesystem, is_local, join, located, plain
from tokenmill.tasks.strict import parse

from .models import SPLITS, Blend, DataSource, TransformSpec

WEIGHT = re.compile(r"\d+(\.\d+)?(e-?\d+)?")
"""A weight in a trainer's blend.json."""

HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
HUB_PAGE = re.compile(
    r"/datasets/(?P<repository>[^/]+(?:/[^/]+)??)"
    r"(?:/(?:tree|blob|resolve|raw)/(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+)(?P<inside>/.+)?)?/?"
)
"""The path of the page of a dataset, or of a folder or file of it at a revision."""

HUB_ID = re.compile(r"(?!.*\.json\Z)\w[\w.-]*/\w[\w.-]*")
"""A name that may be meant as a dataset on the Hub."""

READS_TABLES = "resolve_placeholders"
"""The transform that reads additional data."""


def load_blend(blend: Blend | Mapping[str, Any] | str) -> Blend:
    """Return the blend, or the blend in the JSON file at a path or URI, with absolute data paths.

    Raises InputError for a missing file, malformed JSON (with line and column), and every broken rule.
    """
    if isinstance(blend, Blend):
        return _anchored(blend, str(Path.cwd()))
    if isinstance(blend, Mapping):
        return _anchored(_parsed(blend, "blend"), str(Path.cwd()))
    place = absolute(blend)
    # `org/name` may be a file if there is a folder `org`.
    if HUB_ID.fullmatch(blend) and not Path(place).parent.exists():
        raise InputError(f"{place}: no such blend file; for a dataset of the Hub, write hf://{blend}")
    return _anchored(_parsed(_read_json(place), blend), place.rpartition("/")[0])


def _parsed(content: object, where: str) -> Blend:
    given = cast("Mapping[str, Any]", content if isinstance(content, Mapping) else {})
    lists = {name: cast("list[Any]", value) for name, value in given.items() if isinstance(value, list) and value}
    for name, listed in lists.items():
        # Megatron lists weights and prefixes in turn.
        texts = name in SPLITS and all(isinstance(each, str) for each in listed)
        if texts and all(WEIGHT.fullmatch(each) for each in listed[::2]):
            raise InputError(
                f"{where}: lists prepared files for a trainer; name the blend of sources that they were prepared from"
            )
    for name, listed in lists.items():
        rows = all(isinstance(each, dict) and "path" not in each for each in listed)
        if rows and name not in Blend.model_fields:
            raise InputError(
                f"{where}: isn't a blend; its rows are a list under {name!r}: write these one per line (jq -c '.{name}[]') to a .jsonl"
            )
    return parse(Blend, content, where)


def _read_json(place: str) -> object:
    system, path = filesystem(place)
    if is_local(place) and Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise InputError(f"{place}: is a pipe, a socket or a device; write the blend to a file and name that")
    try:
        text = system.cat_file(path)
    except FileNotFoundError as error:
        folder = Path(place).parent
        names = [each.name for each in folder.glob("*.json")] if is_local(place) and folder.is_dir() else []
        hint = f"; {nearest(Path(place).name, names)}" if names else ""
        raise InputError(f"{place}: no such blend file{hint}") from error
    except OSError as error:
        if not (is_local(place) or isinstance(error, PermissionError)):
            raise
        raise InputError(f"{place}: cannot be read as a blend file: {error.strerror or error}") from error
    try:
        # `json` would keep the last of two equal keys, and drop a dataset silently.
        return json.loads(text, object_pairs_hook=partial(_no_duplicates, place))
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 text at byte {error.start}; a blend is a JSON file") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{place}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError(f"{place}: nested too deeply; a blend is an object with lists of datasets") from error


def _no_duplicates(place: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise InputError(f"{place}: the key {twice!r} is written twice in one object; keep one of the two")


def _anchored(blend: Blend, base: str) -> Blend:
    def anchored(source: DataSource) -> DataSource:
        transforms: list[TransformSpec] = []
        for spec in source.transforms:
            tables = spec.get(READS_TABLES) if isinstance(spec, dict) else None
            if not isinstance(tables, dict):
                transforms.append(spec)
                continue
            found: dict[str, JsonValue] = dict(tables)
            for name, table in tables.items():
                if isinstance(table, dict) and isinstance(path := table.get("path"), str):
                    found[name] = {**table, "path": _anchor_path(path, base)}
            transforms.append({READS_TABLES: found})
        return source.model_copy(update={"path": _anchor_path(source.path, base), "transforms": transforms})

    return blend.model_copy(update={part: [*map(anchored, sources)] for part, sources in blend.parts().items()})


def _anchor_path(path: str, base: str) -> str:
    if path.startswith(ART):
        return located(path)
    if not is_local(path):
        return from_page(path)
    name = plain(path)
    anchored = name if name.startswith(("/", "~")) else join(base, name)
    return absolute(anchored) if is_local(anchored) else anchored


def from_page(url: str) -> str:
    """`hf://org/name[@revision][/path]` for the address of a dataset's page on the hub; other URLs unchanged.

    Raises InputError for other pages of the Hub, and for names that aren't URLs.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"{url}: {error}; correct the address") from error
    # A mirror has the pages of the Hub.
    own = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    if not parts.scheme.startswith("http") or parts.netloc not in HUB_HOSTS | {own}:
        return url
    page = HUB_PAGE.fullmatch(parts.path.removesuffix(".git"))
    if page is None:
        raise InputError(
            f"{url}: isn't the page of a dataset or of its files; write hf://org/name, and 'subset' and 'split' next to it"
        )
    revision = f"@{page['revision']}" if page["revision"] else ""
    return f"hf://{page['repository']}{revision}{unquote(page['inside'] or '')}"
