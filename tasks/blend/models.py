"""The blend: typed, frozen, and fully checked before any data is read.

Data set names become folder names, so they must be safe path segments: ASCII letters, digits, `.`, `_` and `-`, at most
128 characters, not `..`, not reserved by Windows, and unique regardless of case (file systems may ignore case).
"""

import re
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, WithJsonSchema, model_validator
from tokenmill.tasks.strict import Strict

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

_SEGMENT = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def _path_segment(name: str) -> str:
    if not re.fullmatch(_SEGMENT, name) or name.endswith(".") or _RESERVED.fullmatch(name):
        raise ValueError(
            "not a safe name; use 1 to 128 ASCII letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(_path_segment), WithJsonSchema({"type": "string", "pattern": _SEGMENT})]


def _plain_values(wanted: object) -> object:
    values = cast("list[object]", wanted) if isinstance(wanted, list) else [wanted]
    if not values or not all(_is_plain(value) for value in values):
        raise ValueError("not a value to filter by; use text, true or false, an integer of 64 bits, or a list of these")
    return wanted


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < 2**63)


Value = str | int | bool
Wanted = Annotated[Value | list[Value], BeforeValidator(_plain_values)]
"""The value that a field must have, or a list of alternatives."""

TransformSpec = str | dict[str, JsonValue]
"""A transform of rows for reinforcement learning: its name, or a mapping of its name to its argument."""


class DataSource(Strict, frozen=True):
    """One data set of a blend: the place of its rows, and its weight."""

    name: Name = Field(description="Unique name; becomes part of file names.")
    path: str = Field(
        min_length=1,
        pattern=r"\S",
        description="File, folder (recursive), glob, s3://, gs://, hf://org/name or hf://org/name@revision.",
    )
    weight: float = Field(
        default=1.0, ge=0, strict=True, description="Relative share of training tokens; with 0, prepared but not used."
    )
    split: str | None = Field(default=None, description="Split of the data set.")
    subset: str | None = Field(
        default=None, description="Configuration of a Hugging Face data set, or a folder of any other."
    )
    text_field: str = Field(
        default="text", min_length=1, description="Field that holds the text; dots separate nested keys."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face data set.")
    messages_field: str | None = Field(
        default=None, min_length=1, description="Field that holds the messages; detected if omitted."
    )
    tools_field: str = Field(default="tools", min_length=1, description="Field that holds the tools.")
    used_in: str | None = Field(default=None, min_length=1, description="Keep only rows whose used_in names this.")
    filters: dict[str, Wanted] = Field(
        default={}, description="Keep only rows whose field has this value, or one of these."
    )
    converter: str | None = Field(
        default=None, min_length=1, description="Converter to Harmony; chosen by the path if omitted."
    )
    license: str | None = Field(
        default=None, min_length=1, description="Licence of the data set, for its card; best an SPDX identifier."
    )
    languages: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Languages of the data set, for its card, as codes of BCP 47; never guessed.",
    )
    domain: str | None = Field(default=None, min_length=1, description="What the data set is about, for its report.")
    transforms: list[TransformSpec] = Field(
        default=[], description="Transforms of each row for reinforcement learning, in order."
    )

    @model_validator(mode="after")
    def _filters_once(self) -> Self:
        if self.used_in is not None and "used_in" in self.filters:
            raise ValueError("'used_in' is given as a key and under 'filters'; keep one of the two")
        return self


class Blend(Strict, frozen=True):
    """Data sets and weights: either one flat list, `datasets`, or a list per split."""

    datasets: list[DataSource] | None = Field(default=None, description="Flat blend; valid and test are held out.")
    train: list[DataSource] | None = Field(default=None, description="Per-split blend: training data.")
    valid: list[DataSource] | None = Field(default=None, description="Per-split blend: validation data.")
    test: list[DataSource] | None = Field(default=None, description="Per-split blend: test data.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [split for split in SPLITS if getattr(self, split) is not None]
        if self.datasets is not None and named:
            raise ValueError(f"'datasets' and {named[0]!r} cannot be mixed; keep one of the two")
        parts = self.parts()
        if not any(parts.values()):
            raise ValueError("the blend is empty; list at least one data set under 'datasets' or 'train'")
        for split, sources in parts.items():
            _check_unique(split, sources)
            if sources and not any(source.weight for source in sources):
                raise ValueError(f"every weight in {split!r} is 0; give at least one data set a weight above 0")
        return self

    def parts(self) -> dict[str, list[DataSource]]:
        """`{"datasets": …}` for a flat blend, else the splits that it lists."""
        if self.datasets is not None:
            return {"datasets": self.datasets}
        return {split: sources for split in SPLITS if (sources := getattr(self, split)) is not None}


def _check_unique(split: str, sources: list[DataSource]) -> None:
    seen: set[str] = set()
    for source in sources:
        if source.name.lower() in seen:
            raise ValueError(f"the name {source.name!r} occurs twice in {split!r}; names must be unique")
        seen.add(source.name.lower())
