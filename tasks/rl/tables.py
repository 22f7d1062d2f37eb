"""Question tables that rows refer to by number: found at planning, loaded by workers.

A published blend may refer to the rows of a different dataset instead of repeating them (`placeholders`). Row numbers are valid
only for the exact file, so tables are pinned to a commit, and their content is part of a shard's identity. A table is Parquet:
the question is the content of the first message of `prompt`, the answer is `reward_model.ground_truth`. The rows in several
files are numbered continuously, in the order of their names.

Tables are repetitive: DAPO-Math-17k holds 17,000 questions a hundred times each. Arrow dictionary-encodes each batch, so each
text is stored once and a row is two numbers: 1.8 million rows load in 4 s and take 25 MB instead of 900 MB. Texts are stored as
Python strings: looking up a row takes 0.4 µs, a fifth of the time with Arrow scalars.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from sys import maxsize
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from pydantic import Field, JsonValue
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError, nearest
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import Slice, SourceFile, slice_of
from tokenmill.tasks.sources.formats import count_rows, format_of
from tokenmill.tasks.sources.opening import SourceCorrupt
from tokenmill.tasks.sources.parquet import column_batches
from tokenmill.tasks.sources.slices import ContentIndex, cut
from tokenmill.tasks.storage import ChangeDetection
from tokenmill.tasks.strict import Strict, parse

Style = Literal["dapo", "skywork"]
"""How a question and a template form a prompt (`placeholders`)."""

FIELDS = ("prompt", "reward_model.ground_truth")
TEXTS = (pa.string(), pa.large_string())

NOTHING = -1
"""The number of a null text."""


class TableSource(Strict, frozen=True):
    """A question table in a blend."""

    path: str = Field(min_length=1, description="Parquet file, folder, glob, s3://, gs:// or hf://org/name[@revision].")
    style: Style = Field(description="How a template is filled: dapo (prefix and suffix) or skywork ({question}).")
    split: str | None = Field(default=None, description="Split to take of a Hugging Face dataset.")
    subset: str | None = Field(default=None, description="Configuration to take of a Hugging Face dataset.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face dataset.")


DAPO = TableSource(
    path="hf://BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet",
    revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
    style="dapo",
)
SKYWORK = TableSource(
    path="hf://Skywork/Skywork-OR1-RL-Data",
    split="math",
    revision="1cdedc52e0e2db85fdf252f9be682e63a5a38c33",
    style="skywork",
)

_BY_SPLIT = {"BytedTsinghua-SIA/DAPO-Math-17k/train": DAPO, "Skywork/Skywork-OR1-RL-Data/math": SKYWORK}

KEY_SETS: dict[str, dict[str, TableSource]] = {
    "nano3": {"nano_v3_sft_profiled_dapo17k": DAPO, "nano_v3_sft_profiled_skywork_no_omni": SKYWORK},
    "super3": {"super_v3_lcsft_step1000_dapo17k": DAPO, "super_v3_lcsft_step1000_skyworks": SKYWORK},
    "ultra3": _BY_SPLIT,
    "lightning35": _BY_SPLIT,
}
"""The tables for NVIDIA's published blends, by the value of `dataset` in a row, or by that and `split` in its placeholder.

https://huggingface.co/datasets/nvidia/Nemotron-3-Nano-RL-Training-Blend
https://huggingface.co/datasets/nvidia/Nemotron-RL-Super-Training-Blends
https://huggingface.co/datasets/nvidia/Nemotron-RL-Ultra-Training-Blends
https://huggingface.co/datasets/nvidia/Nemotron-RL-Lightning-Training-Blend
"""


def table_sources(argument: JsonValue) -> dict[str, TableSource]:
    """Return the tables by name: a key set's, or an object's. Raises InputError for other values."""
    if isinstance(argument, str):
        if argument not in KEY_SETS:
            raise InputError(f"resolve_placeholders: no set of tables {argument!r}; {nearest(argument, KEY_SETS)}")
        return dict(KEY_SETS[argument])
    # Keys with an underscore are comments, as everywhere in a blend.
    named = argument if isinstance(argument, dict) else {}
    tables = {name: table for name, table in named.items() if not name.startswith("_")}
    if not tables:
        raise InputError(
            f"resolve_placeholders: {argument!r} doesn't name tables; write {' or '.join(map(repr, KEY_SETS))}, "
            'or tables by the value of dataset: {"my-questions": {"path": "table.parquet", "style": "dapo"}}'
        )
    return {name: parse(TableSource, table, f"resolve_placeholders: table {name!r}") for name, table in tables.items()}


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of a planned table, one slice each, in the order in which rows are numbered."""

    style: Style
    slices: tuple[Slice, ...]

    @property
    def contents(self) -> list[str]:
        """The contents of the table; with `style`, all that can change a byte."""
        return [part.content for part in self.slices]

    def record(self) -> dict[str, Any]:
        """Plain JSON for workers."""
        return {"style": self.style, "slices": [asdict(part) for part in self.slices]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TableFiles":
        """Return the files that `record` wrote."""
        return cls(record["style"], tuple(map(slice_of, record["slices"])))


def find_table(source: TableSource, name: str, index: ContentIndex, identity: ChangeDetection) -> TableFiles:
    """Return the files of a table, identified by content.

    Raises InputError for a table that is missing or empty or has other columns, SourceCorrupt for a file without footer.
    """
    pinned = index.identify(table_slices(source, name), FIELDS, identity)
    # One row at most is counted in each file.
    if not any(count_rows(part, 1) for part in pinned):
        raise InputError(f"table {name!r}: {source.path} doesn't contain rows; fix the path")
    return TableFiles(source.style, tuple(pinned))


def table_slices(source: TableSource, name: str) -> list[Slice]:
    """Return the whole files of a table, only from listings and footers. Raises as `find_table` does."""
    # Found like any dataset: folders, globs, buckets and the hub.
    place = DataSource(name="table", **source.model_dump(exclude={"style"}))
    try:
        return [part for file in discover(place) for part in _whole(file)]
    except InputError as error:
        raise InputError(f"table {name!r}: {error}") from error


def _whole(file: SourceFile) -> list[Slice]:
    if not format_of(file).columnar:
        raise InputError(f"{file.uri}: a question table must be Parquet; convert it, or name only Parquet files")
    return cut(file, maxsize, FIELDS, _require_questions)


def _require_questions(metadata: pq.FileMetaData, fields: Sequence[str], uri: str) -> None:
    """Raise InputError unless a file has the columns of a question table."""
    schema = metadata.schema.to_arrow_schema()
    known: dict[str, pa.DataType] = {each.name: each.type for each in schema}
    # Null stands for a type that isn't there, so that each step below can go on without a check.
    prompt, judged = known.get("prompt", pa.null()), known.get("reward_model", pa.null())
    content = _inner(prompt.value_type, "content") if _is_list(prompt) else pa.null()
    if not _is_text(content) or not _is_answer(_inner(judged, "ground_truth")):
        columns = ", ".join(f"{name}: {kind}" for name, kind in known.items())
        raise InputError(
            f"{uri}: not a question table; it needs {' and '.join(fields)}: a list of messages whose 'content' is "
            f"text, and text, a number or a list of these; name a different file, or rename its columns ({columns or 'none'})"
        )


def _inner(kind: pa.DataType, name: str) -> pa.DataType:
    """The type of a field in a struct, null if there is none."""
    number = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
    return pa.null() if number < 0 else kind.field(number).type


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in TEXTS


def _is_answer(kind: pa.DataType) -> bool:
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return plain or _is_text(kind) or (_is_list(kind) and _is_answer(kind.value_type))


@dataclass(frozen=True, slots=True)
class LookupColumn:
    """A column of text: distinct texts, and for every row its index in `texts` (int32), or NOTHING."""

    texts: list[str]
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, row: int) -> str | None:
        """Return the text of a row in `range(len(self))`, or None."""
        number = self.numbers.item(row)
        return None if number == NOTHING else self.texts[number]


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A loaded table. Answers that are not text are kept as JSON."""

    style: Style
    questions: LookupColumn
    answers: LookupColumn

    def __len__(self) -> int:
        return len(self.questions)

    def row(self, number: int) -> tuple[str | None, str | None] | None:
        """Return question and answer of a row, None for null; None if the row doesn't exist."""
        return (self.questions.at(number), self.answers.at(number)) if 0 <= number < len(self) else None


@lru_cache(maxsize=8)
def load_table(files: TableFiles) -> LookupTable:
    """Load a table, once per process. Raises RunError if a file changed since the plan, SourceCorrupt if it is damaged."""
    questions, answers = _Encoder(), _Encoder()
    for part in files.slices:
        try:
            for batch in cast("Iterator[pa.RecordBatch]", column_batches(part, FIELDS, _require_questions)):
                prompts = cast("pa.ListArray", batch.column("prompt"))
                # The place of each prompt's first message among all messages; a prompt without any has none.
                filled = compute.call_function("greater", [prompts.value_lengths(), pa.scalar(0)])
                starts = prompts.offsets[:-1]
                first = compute.call_function("if_else", [filled, starts, pa.scalar(None, starts.type)])
                questions.add(_field(prompts.values, "content").take(first), part.file)
                truths = _field(batch.column("reward_model"), "ground_truth")
                if not _is_text(truths.type):
                    written = [None if each is None else orjson.dumps(each).decode() for each in truths.to_pylist()]
                    truths = pa.array(written, pa.large_string())
                answers.add(truths, part.file)
        except FileNotFoundError as error:
            raise RunError(
                f"{part.file.uri}: gone since the plan; put it back and run the same command again"
            ) from error
    return LookupTable(files.style, questions.column(), answers.column())


def _field(structs: pa.StructArray, name: str) -> pa.Array:
    return structs.flatten()[structs.type.get_field_index(name)]  # null where the struct is


class _Encoder:
    """Builds a column; texts are numbered in the order of first occurrence."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._numbers: list[np.ndarray] = []

    def add(self, texts: pa.Array, file: SourceFile) -> None:
        """Append the texts of a batch of `file`. Raises SourceCorrupt for text that is not UTF-8."""
        encoded = cast("pa.DictionaryArray", texts.cast(pa.large_binary()).dictionary_encode())
        try:
            distinct = encoded.dictionary.cast(pa.large_string()).to_pylist()  # a cast from binary looks at every byte
        except pa.ArrowInvalid as error:
            raise SourceCorrupt(f"{file.uri}: a question or answer is not UTF-8; fetch the file again") from error
        # Only distinct texts become Python strings; the rows of a batch stay arrays.
        known = self._known
        numbers = [known.setdefault(text, len(known)) for text in distinct]
        # The number at -1, the last one, is that of nulls.
        table = np.array([*numbers, NOTHING], np.int32)
        self._numbers.append(table[encoded.indices.fill_null(-1).to_numpy()])

    def column(self) -> LookupColumn:
        """Return the column of all batches."""
        return LookupColumn(list(self._known), np.concatenate([np.empty(0, np.int32), *self._numbers]))
