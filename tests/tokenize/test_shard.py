"""No row is lost, whatever is wrong with it; and what is held out depends on the document alone."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.sources import json_lines

from tests.preparing import blend_of, compressed, documents_of, prepare, quarantined, write_lines
from tests.tokenize.small_vocabularies import reference

NOTHING_HELD_OUT = {"valid": 0, "test": 0}


@pytest.fixture(scope="module")
def tokenizer(small):
    return reference(small)


@dataclass(frozen=True)
class Corpus:
    """A file, and what is known of it beforehand: its rows, its good texts, and line and reason of its bad rows."""

    path: Path
    rows: int
    texts: list[str]
    bad: list[tuple[int, str]]
    drops: dict[str, int]


BLANK, EMPTY = "blank_line", "empty_document"
LONG = "long enough for several batches " * 80_000

ROWS = [
    # the row as bytes, and its text, or the reason why it has none
    (b"\xef\xbb\xbf" + b'{"text": "after a byte order mark"}', "after a byte order mark"),
    (b'{"text": "one"}', "one"),
    (b'{"text": "cut short', "malformed_json"),
    (b'{"text": "ends with a carriage return"}\r', "ends with a carriage return"),
    (b'{"text": "\xff\xfe"}', "invalid_utf8"),
    (b'{"text": "half a pair \\ud83d"}', "lone_surrogate"),
    (b"", BLANK),
    (b'{"text": "first", "text": "last"}', "last"),
    (b"[1, 2]", "not_an_object"),
    (b"3", "not_an_object"),
    (b'{"body": "elsewhere"}', "missing_field"),
    (b"{}", "missing_field"),
    (b'{"text": null}', "null_text"),
    (b'{"text": 7}', "not_a_string"),
    (b'{"text": ["a"]}', "not_a_string"),
    (b" \t ", BLANK),
    (b'{"text": ""}', EMPTY),
    (b'{"text": "x"} {"text": "y"}', "malformed_json"),
    (b'{"text": NaN}', "malformed_json"),
    ('{"text": "漢字 \\u00e9 \\ud83d\\ude00 \u2028 end"}'.encode(), "漢字 é 😀 \u2028 end"),
    (b"\r", BLANK),
    (b'{"text": "before the end"}', "before the end"),
    (b"not json at all", "malformed_json"),
]
"""Every way in which a row of text can be good or bad."""

LONG_ROWS = [
    (json.dumps({"text": LONG}).encode(), LONG),
    (b'{"text": "' + b"z" * (5 << 20) + b'"}', "row_too_long"),
    (b'{"text": "after it"}', "after it"),
]


def corpus(path, content, rows):
    path.write_bytes(content)
    reasons = [(line, what) for line, (_, what) in enumerate(rows, 1) if what in REASONS]
    return Corpus(
        path=path,
        rows=len(rows),
        texts=[what for _, what in rows if what not in REASONS],
        bad=[(line, reason) for line, reason in reasons if reason not in {BLANK, EMPTY}],
        drops=Counter(reason for _, reason in reasons),
    )


REASONS = {
    BLANK, EMPTY, "malformed_json", "invalid_utf8", "lone_surrogate", "not_an_object", "missing_field", "null_text",
    "not_a_string", "row_too_long",
}  # fmt: skip


def lines(folder, name, rows=ROWS):
    return corpus(folder / name, compressed(name, b"\n".join(row for row, _ in rows)), rows)


def array(folder, name):
    """The same rows as one array, less those that only lines can have."""
    whole = [row for row in ROWS if row[1] not in {BLANK, "malformed_json"} and not row[0].startswith(b"\xef")]
    rows = [*whole[:4], (b'{"text": "a" "b"}', "malformed_json"), *whole[4:]]
    return corpus(folder / name, compressed(name, b"[" + b",\n ".join(row for row, _ in rows) + b"]\n"), rows)


def parquet(folder, name):
    """Row groups of two, of text as bytes."""
    rows = [
        (b"one", "one"), (None, "null_text"), ("漢字".encode(), "漢字"), (b"\xff", "invalid_utf8"), (b"", EMPTY),
        (b"six", "six"), (b"seven", "seven"), (b"half \xed\xa0\xbd", "invalid_utf8"), (None, "null_text"),
    ]  # fmt: skip
    table = pa.table({"text": pa.array([row for row, _ in rows], pa.binary())})
    pq.write_table(table, folder / name, row_group_size=2)
    return corpus(folder / name, (folder / name).read_bytes(), rows)


MAKERS = {
    "some.jsonl": lines, "some.jsonl.gz": lines, "some.jsonl.zst": lines, "some.json": array, "some.json.gz": array,
    "some.json.zst": array, "some.parquet": parquet,
}  # fmt: skip


def assert_conserved(given, output, manifest, tokenizer):
    totals = manifest["totals"]
    assert totals["rows"] == given.rows
    assert totals["documents"] + sum(totals["dropped"].values()) == given.rows
    assert totals["dropped"] == given.drops
    assert documents_of(output, tokenizer) == given.texts
    assert [(row["line"], row["reason"]) for row in quarantined(output)] == given.bad
    assert {row["file"] for row in quarantined(output)} == {str(given.path)}


def prepared(given, output, small, **settings):
    everything = {"holdout": NOTHING_HELD_OUT, "max_bad_row_fraction": 1.0, **settings}
    return prepare(blend_of(given.path), output, tokenizer={"model": str(small)}, **everything)


@pytest.mark.parametrize("shard_size", [25, 10**9])
@pytest.mark.parametrize("name", MAKERS)
def test_every_row_is_a_document_or_a_counted_drop(small, tokenizer, tmp_path, name, shard_size):
    given = MAKERS[name](tmp_path, name)
    _, manifest = prepared(given, tmp_path / "out", small, shard_size=shard_size)
    assert_conserved(given, tmp_path / "out", manifest, tokenizer)
    if shard_size < 100 and name in {"some.jsonl", "some.parquet"}:
        assert len(manifest["shards"]) > 2


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [1 << 20, 10**9])
@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.gz"])
def test_rows_longer_than_a_block_are_read_or_counted(small, tokenizer, tmp_path, name, shard_size, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_ROW_BYTES", 4 << 20)
    given = lines(tmp_path, name, [*ROWS[:3], *LONG_ROWS, *ROWS[3:6]])
    _, manifest = prepared(given, tmp_path / "out", small, shard_size=shard_size)
    assert_conserved(given, tmp_path / "out", manifest, tokenizer)


def test_normal_drops_are_unlimited(small, tmp_path):
    source = write_lines(tmp_path / "some.jsonl", [b"", "", "x", "long enough"] * 50)
    chosen = {"tokenizer": {"model": str(small)}, "min_doc_chars": 2, "on_bad_row": "fail"}
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    assert manifest["totals"]["dropped"] == {"blank_line": 50, "too_short": 100}
    assert manifest["totals"]["documents"] == 50


DOCUMENTS = [f"document {number} says {number * 7919 % 10_007}" for number in range(20_000)]
TWICE = DOCUMENTS[::10]
SHARES = {"valid": 0.05, "test": 0.03}


@pytest.fixture(scope="module")
def held_out(small, tokenizer, tmp_path_factory):
    """`held_out(texts…, **holdout)`: the texts of each split, prepared from a source for each list of texts."""

    def held_out(*sources, shard_size=100_000, **holdout):
        folder = tmp_path_factory.mktemp("held_out")
        paths = [write_lines(folder / f"s{number}.jsonl", texts) for number, texts in enumerate(sources)]
        prepare(
            blend_of(*paths), folder / "out", tokenizer={"model": str(small)}, shard_size=shard_size,
            holdout={**SHARES, **holdout},
        )  # fmt: skip
        return {split: Counter(documents_of(folder / "out", tokenizer, split)) for split in ("train", "valid", "test")}

    return held_out


@pytest.fixture(scope="module")
def splits(held_out):
    """20,000 documents, of which 2,000 occur once more in another source."""
    return held_out(DOCUMENTS, TWICE)


@pytest.mark.parametrize(("split", "share"), {**SHARES, "train": 0.92}.items())
@pytest.mark.parametrize("source", [DOCUMENTS, TWICE], ids=["one source", "the other"])
def test_shares_are_as_asked(splits, split, share, source):
    deviation = (share * (1 - share) * len(source)) ** 0.5
    assert abs(sum(text in splits[split] for text in source) - share * len(source)) < 5 * deviation


def test_the_splits_are_the_whole_and_share_nothing(splits):
    assert splits["train"] + splits["valid"] + splits["test"] == Counter(DOCUMENTS) + Counter(TWICE)
    for one, other in itertools.combinations(splits.values(), 2):
        assert not one.keys() & other.keys()


def test_more_data_keeps_documents_in_their_splits(held_out, splits):
    fewer = held_out(DOCUMENTS[1_000:9_000], shard_size=7_777)
    for split, texts in fewer.items():
        assert texts.keys() == splits[split].keys() & set(DOCUMENTS[1_000:9_000])


def test_a_larger_share_only_adds(held_out, splits):
    assert splits["test"].keys() < held_out(DOCUMENTS, test=0.06)["test"].keys()


def test_new_seed_holds_out_other_documents(held_out, splits):
    other = held_out(DOCUMENTS, seed=43)["valid"].keys()
    both = len(other & splits["valid"].keys())
    assert both < 100, "as few as two independent choices of 1,000 in 20,000 have in common: 50"


def test_only_requested_splits_are_held_out(held_out):
    splits = held_out(DOCUMENTS[:2_000], valid=0)
    assert not splits["valid"]
    assert splits["test"].total() + splits["train"].total() == 2_000


def test_blend_with_splits_lacks_holdout(small, tokenizer, tmp_path):
    train = write_lines(tmp_path / "train.jsonl", DOCUMENTS[:300])
    valid = write_lines(tmp_path / "valid.jsonl", DOCUMENTS[300:400])
    blend = {"train": blend_of(train)["datasets"], "valid": blend_of(valid)["datasets"]}
    prepare(blend, tmp_path / "out", tokenizer={"model": str(small)}, holdout={"valid": 0.4, "test": 0.4})
    assert documents_of(tmp_path / "out", tokenizer, "train") == DOCUMENTS[:300]
    assert documents_of(tmp_path / "out", tokenizer, "valid") == DOCUMENTS[300:400]
    assert json.loads((tmp_path / "out/blend.json").read_bytes())["test"] is None
