"""Rows of text and of Harmony as documents."""

import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup.readers import read_harmony, read_text
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.slices import cut

from tests.preparing_dedup import stored_conversations
from tests.preparing_rl import write_rows
from tests.shards.damage import DAMAGES

ROWS = [
    {"text": "one", "id": "a", "at": {"topic": 1}},
    b"",
    {"text": None, "id": "b"},
    {"text": "two", "at": {"topic": [True, "x"]}},
    b"{broken",
    {"text": "three", "id": 3.5, "at": "nowhere"},
]


def part_of(path, size=1 << 40):
    part, *_ = cut(discover(DataSource(name="a", path=str(path)))[0], size, [])
    return part


def options(**chosen):
    return {"text_field": "text", "id_field": None, "cap_by": None, **chosen}


def listed(documents, name):
    return [value for each in documents for value in getattr(each, name).tolist()]


def texts_in(documents, name):
    return [value for each in documents for value in getattr(each, name).to_pylist()]


def test_texts_are_documents_and_other_rows_are_counted(tmp_path):
    found = list(read_text(part_of(write_rows(tmp_path / "a.jsonl", ROWS)), options(), "conversation"))
    assert texts_in(found, "texts") == ["one", "two", "three"]
    assert listed(found, "rows") == [0, 3, 5]
    left_out = sum((Counter(each.left_out) for each in found), Counter())
    assert left_out == {"blank_line": 1, "null_text": 1, "malformed_json": 1}
    assert found[0].names is found[0].prompts is None


def parquet(tmp_path, rows):
    good = [row for row in rows if isinstance(row, dict)]
    columns = {name: [row.get(name) for row in good] for name in ("text", "id")}
    columns["id"] = [None if each is None else str(each) for each in columns["id"]]
    topics = [row["at"] if isinstance(row.get("at"), dict) else {} for row in good]
    columns["at"] = pa.array([{"topic": str(each["topic"]) if each else None} for each in topics])
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=3)
    return tmp_path / "a.parquet"


def test_ids_and_prompts_belong_to_the_same_row(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.tasks.sources.parquet_batches.MAX_BATCH_ROWS", 2)
    chosen = options(id_field="id", cap_by="at.topic")
    lines = list(read_text(part_of(write_rows(tmp_path / "a.jsonl", [b"{", b"", *ROWS])), chosen, "conversation"))
    assert texts_in(lines, "names") == ["a", None, "3.5"]
    assert texts_in(lines, "prompts") == ["1", '[true,"x"]', None]
    columns = list(read_text(part_of(parquet(tmp_path, ROWS)), chosen, "conversation"))
    assert len(columns) > 1
    assert texts_in(columns, "names") == ["a", None, "3.5"]
    assert texts_in(columns, "prompts") == ["1", "[True, 'x']", None]
    assert listed(columns, "rows") == [0, 2, 3]


def test_a_column_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(InputError, match="has none of the fields 'name'"):
        list(read_text(part_of(parquet(tmp_path, ROWS)), options(id_field="name"), "conversation"))


def test_a_file_that_changed_since_it_was_planned_is_an_error(tmp_path):
    part = part_of(write_rows(tmp_path / "a.jsonl", ROWS))
    documents = read_text(part, options(), "conversation")
    next(documents)
    write_rows(tmp_path / "a.jsonl", [*ROWS, {"text": "four"}])
    with pytest.raises(RunError, match="changed while"):
        list(documents)


CONVERSATION = [
    HarmonyMessage("system", "You are a mill."),
    HarmonyMessage("developer", "# Instructions\n\nGrind."),
    HarmonyMessage("user", "What is flour?"),
    HarmonyMessage("assistant", "They ask of flour.", channel="analysis"),
    HarmonyMessage("assistant", "Ground wheat.", channel="final"),
    HarmonyMessage("user", "And bran?"),
    HarmonyMessage("assistant", "Its hull.", channel="final", terminator="return"),
]


def harmony_file(tmp_path, texts):
    """A file of normalized rows in a store, and a slice that names it."""
    columns = {
        "row_id": [f"row{number}" for number in range(len(texts))],
        "text": texts,
        "prompt_id": ["p"] * len(texts),
        "meta_correctness_own": pa.array([None, 0.5, 1.0][: len(texts)], pa.float64()),
    }
    return stored_conversations(tmp_path, columns)


@pytest.mark.parametrize(
    ("near_on", "view"),
    [
        ("conversation", "What is flour? They ask of flour. Ground wheat. And bran? Its hull."),
        ("prompt", "What is flour? And bran?"),
    ],
)
def test_conversations_are_compared_by_their_text(tmp_path, near_on, view):
    text = render(CONVERSATION)
    found = list(read_harmony(harmony_file(tmp_path, [text] * 3), {}, near_on))
    assert texts_in(found, "names") == ["row0", "row1", "row2"]
    assert listed(found, "rows") == [0, 1, 2]
    assert [str(value) for value in listed(found, "qualities")] == ["nan", "0.5", "1.0"]
    for each in found:
        assert {*each.texts.to_pylist()} == {text.replace("\n\n", " ")}
        assert {*each.sizes.tolist()} == {len(text)}
        assert {*each.views.to_pylist()} == {view}
        assert {*each.prompts.to_pylist()} == {"p"}


@pytest.mark.parametrize("first", ["\u0338", "\u0327\u0338", " \n", "e\u0301", "|>", "<|"])
def test_body_prefixes_do_not_hide_text(tmp_path, first):
    text = render([HarmonyMessage("user", f"{first} Why?\n"), *CONVERSATION[4:5]])
    (found,) = read_harmony(harmony_file(tmp_path, [text]), {}, "conversation")
    (view,) = found.views.to_pylist()
    assert view.split() == unicodedata.normalize("NFC", f"{first} Why?\n\nGround wheat.").split()
    assert view == " ".join(view.split())


def test_non_harmony_text_is_an_error(tmp_path):
    with pytest.raises(RunError, match="a normalized row is not valid Harmony"):
        list(read_harmony(harmony_file(tmp_path, ["plain"]), {}, "conversation"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_normalized_rows_is_not_signed_and_loses_its_receipt(tmp_path, damage):
    part = harmony_file(tmp_path, [render(CONVERSATION)] * 3)
    DAMAGES[damage](Path(part.file.uri))
    with pytest.raises(RunError, match=r"all\.parquet: .*run the same command again"):
        next(read_harmony(part, {}, "conversation"))
    kind, key = part.file.uri.split("/")[-3:-1]
    assert Store(str(tmp_path), kind).receipt(key) is None
