"""Preparations as Python functions: `from tokenmill import pretrain`."""

import json
from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from typing import Any, cast

import numpy as np
import orjson
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.input_checks import check_inputs
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.shards.publish import publish
from tokenmill.tasks.storage import absolute

from .direct import run_preparation


def function_of(name: str) -> Callable[..., dict[str, Any]]:
    """The function that prepares a blend or rows from Python. Raises InputError and RunError as the command does."""

    def prepare_data(
        data: Blend | dict[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]],
        output_dir: str | PathLike[str],
        **settings: object,
    ) -> dict[str, Any]:
        output_dir, named = fspath(output_dir), _text_of(data)
        settings = {name: _text_of(value) for name, value in settings.items()}
        if not isinstance(named, (str, Blend, dict)):
            named = blend_of_rows(cast("Iterable[object]", named), output_dir)
        blend = preparation(name).read_blend(cast("Blend | Mapping[str, Any] | str", named))
        check_inputs(blend, cast("str | None", settings.get("store")), output_dir)
        return run_preparation(name, blend, output_dir, settings)

    prepare_data.__name__, prepare_data.__doc__ = name, KINDS[name].summary
    return prepare_data


def _text_of(value: object) -> object:
    return fspath(value) if isinstance(value, PathLike) else value


def blend_of_rows(rows: Iterable[object], output_dir: str) -> dict[str, Any]:
    """A blend of one data set, `rows`, which are written beside the output folder: OUT.rows.jsonl.

    Raises InputError for a row that is not a JSON object.
    """
    place = f"{absolute(output_dir)}.rows.jsonl"
    with publish(place) as file:
        for number, row in enumerate(rows, 1):
            file.write(_line(row, number))
    return {"datasets": [{"name": "rows", "path": place}]}


def _line(row: object, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise InputError(f"row {number}: {type(row).__name__}, not a dict; give rows as dicts, such as {{'text': '…'}}")
    try:
        line = orjson.dumps(dict(row), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        if b"null" in line:  # orjson writes NaN and infinities so, too
            json.dumps(dict(row), allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise InputError(f"row {number}: {error}; rows must hold JSON values") from error
    return line


def _plain(value: Any) -> object:  # noqa: ANN401 - whatever orjson writes and json does not
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
