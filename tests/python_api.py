"""`__init__.pyi`, the typed signatures of `import tokenmill`, from the models that check settings; `settings_page` writes it."""

import inspect
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tokenmill
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from tokenmill.flows.from_python import parameters
from tokenmill.tasks.shards.kinds import KINDS

STUB = Path(__file__).parents[1] / "__init__.pyi"

HEAD = '''"""Blends of raw text in, training-ready token shards out."""

# Generated from the models that check settings: python -m tests.settings_page

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict

from pandas import DataFrame

from tokenmill.tasks.dataset.dataset import Dataset
from tokenmill.tasks.errors import InputError, RunError

__all__ = {names}

class ArrowStream(Protocol):
    """A table from pandas, polars, pyarrow, DuckDB or `datasets`."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...

def open(output_dir: str | PathLike[str]) -> Dataset:
    """Open a published output: splits, parts, documents, packs, rows, and their origins."""

def dataframe(
    output_dir: str | PathLike[str], rows: Literal["documents", "packs", "shards"] = "documents"
) -> DataFrame:
    """The documents, packs or shards of an output of tokens, as pandas."""

'''

NAMES = {int: "int", float: "float", str: "str", bool: "bool", NoneType: "None"}

DATA = "Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream"


def stub() -> str:
    """The content of `__init__.pyi`."""
    models: dict[str, type[BaseModel]] = {}
    functions = "\n".join(_function(name, models) for name in KINDS)
    tables: dict[str, str] = {}
    while missing := models.keys() - tables.keys():
        tables |= {name: _table(models[name], models) for name in sorted(missing)}
    names = ", ".join(f'"{name}"' for name in tokenmill.__all__)
    return HEAD.replace("{names}", f"[{names}]") + "".join(tables[name] for name in sorted(tables)) + functions


def _function(name: str, models: dict[str, type[BaseModel]]) -> str:
    fields = parameters(name)
    lines = "".join(
        f"    {key}: {_text(field.annotation, field, models)} = {_default(field)},\n" for key, field in fields.items()
    )
    about = "".join(
        textwrap.fill(f"{key}: {field.description}", 116, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"
        for key, field in fields.items()
        if field.description
    )
    return (
        f"def {name}(\n    data: {DATA},\n    output_dir: str | PathLike[str],\n    *,\n{lines}) -> dict[str, Any]:\n"
        f'    """{KINDS[name].summary}\n\n    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.\n\n'
        f'    Args:\n{about}    """\n'
    ).replace("\\", "\\\\")


def _table(model: type[BaseModel], models: dict[str, type[BaseModel]]) -> str:
    lines = "".join(
        f"    {key}: {_text(field.annotation, field, models)}\n" for key, field in model.model_fields.items()
    )
    return f'class {model.__name__}(TypedDict, total=False):\n    """{(inspect.getdoc(model) or "").partition(chr(10))[0]}"""\n\n{lines}\n'


def _default(field: FieldInfo) -> str:
    value = field.default
    plain = isinstance(value, (str, int, float, NoneType)) and not field.is_required()
    return (f'"{value}"' if isinstance(value, str) else repr(value)) if plain else "..."


def _text(kind: Any, field: FieldInfo | None, models: dict[str, type[BaseModel]]) -> str:
    """A type as Python spells it, with the texts that a model takes for it."""
    metadata = list(field.metadata) if field else []
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        metadata += more
    if kind is int and any(isinstance(each, BeforeValidator) for each in metadata):
        return "int | str"
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]".replace("'", '"')
    arguments = [_text(each, None, models) for each in get_args(kind)]
    if get_origin(kind) in {Union, UnionType}:
        return " | ".join(dict.fromkeys(arguments))
    if arguments:
        outer = {list: "Sequence", tuple: "Sequence", dict: "Mapping"}.get(get_origin(kind), get_origin(kind).__name__)
        return f"{outer}[{', '.join(arguments[:1] if outer == 'Sequence' else arguments)}]"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        models[kind.__name__] = kind
        return kind.__name__
    return NAMES.get(kind, "Any")
