"""Files as other programs write them: compressed text, separated values, plain text and Arrow IPC, judged by their libraries."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from datetime import date

import lz4.frame
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, ipc
from pyarrow.parquet import encryption
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.sources import opening
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import count_rows, place_of, read_records, read_texts
from tokenmill.tasks.sources.slices import ContentIndex, cut, leading_rows

from tests.preparing import blend_of, documents_of, prepare
from tests.tokenize.small_vocabularies import byte_level_bpe, reference

PACK = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".zstd": zstandard.compress,
    ".bz2": bz2.compress, ".xz": lzma.compress, ".lz4": lz4.frame.compress,
}  # fmt: skip
TEXTS = ["one", 'a "quoted", é\nsecond line', "", "語 " * 2000]


def slices(path, names=("text",), **fields):
    found = [part for file in discover(DataSource(name="a", path=str(path), **fields)) for part in cut(file, 10**9, [])]
    return ContentIndex().identify(found, names, "content")


def texts_of(path, **fields):
    return [
        text
        for part in slices(path, **fields)
        for batch in read_texts(part, "text")
        for text in batch.texts.to_pylist()
    ]


def bad_of(path, **fields):
    batches = [batch for part in slices(path, **fields) for batch in read_texts(part, "text")]
    return [(row.row, row.reason) for batch in batches for row in batch.bad]


def as_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def as_csv(texts, **dialect):
    file = io.StringIO(newline="")
    csv.writer(file, **dialect).writerows([["id", "text"], *enumerate(texts)])
    return file.getvalue().encode()


def as_arrow(texts, new=ipc.new_stream, **options):
    table, file = pa.table({"text": texts}), pa.BufferOutputStream()
    with new(file, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)
    return file.getvalue().to_pybytes()


def as_feather(texts, compression):
    file = pa.BufferOutputStream()
    feather.write_feather(pa.table({"text": texts}), file, compression=compression)
    return file.getvalue().to_pybytes()


def by_polars(texts, **options):
    file = io.BytesIO()
    pl.DataFrame({"text": texts}).write_ipc(file, **options)
    return file.getvalue()


CONTENTS = {
    ".jsonl": as_lines(TEXTS),
    ".ndjson": as_lines(TEXTS),
    ".json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    ".csv": as_csv(TEXTS),
    ".tsv": as_csv(TEXTS, delimiter="\t", lineterminator="\n"),
    ".arrow": as_arrow(TEXTS),
}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("ending", CONTENTS)
def test_texts_of_every_format_and_compression(tmp_path, ending, suffix):
    (tmp_path / f"a{ending}{suffix}").write_bytes(PACK[suffix](CONTENTS[ending]))
    assert texts_of(tmp_path) == TEXTS
    (part,) = leading_rows(slices(tmp_path), 2)
    assert [len(batch.texts) for batch in read_texts(part, "text")] == [2]
    assert count_rows(slices(tmp_path)[0], 100) == len(TEXTS)


@pytest.mark.parametrize(
    "content",
    [
        as_arrow(TEXTS, ipc.new_file), as_arrow(TEXTS, ipc.new_file, compression="zstd"), as_feather(TEXTS, "lz4"),
        as_feather(TEXTS, "uncompressed"), by_polars(TEXTS), by_polars(TEXTS, compression="zstd"),
        as_arrow(pa.array(TEXTS).dictionary_encode(), emit_dictionary_deltas=True),
        as_arrow(pa.array(TEXTS, pa.string_view())), as_arrow(pa.array(TEXTS, pa.large_binary())),
    ],
)  # fmt: skip
def test_arrow_files_by_any_writer(tmp_path, content):
    for ending in ("arrow", "feather", "ipc"):
        (tmp_path / f"a.{ending}").write_bytes(content)
    assert texts_of(tmp_path) == TEXTS * 3


def test_a_record_is_the_same_from_arrow_as_from_parquet(tmp_path):
    turns = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    table = pa.table({
        "messages": pa.array([[{"role": "user", "content": "hi"}], None], pa.list_(turns)),
        "tags": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        "score": [0.5, None],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "b.feather")
    found = [
        [record for part in slices(tmp_path / name, []) for batch in read_records(part, []) for record in batch.records]
        for name in ("a.parquet", "b.feather")
    ]
    assert [{key: value for key, value in row.items() if value is not None} for row in found[1]] == found[0]


def test_arrow_values_without_json_and_bad_texts(tmp_path):
    texts = pa.array([b"fine", b"\xff", None], pa.binary()).view(pa.binary())
    strings = pa.Array.from_buffers(pa.string(), 3, pa.array([b"fine", b"\xff", None], pa.binary()).buffers())
    for name, column in {"b": texts, "s": strings}.items():
        table = pa.table({"text": column, "when": [date(2020, 1, 2)] * 3, "image": [b"\xff\xfe"] * 3})
        feather.write_feather(table, tmp_path / f"{name}.feather")
    assert texts_of(tmp_path) == ["fine", "fine"]
    assert bad_of(tmp_path / "b.feather") == [(1, "null_text"), (2, "null_text")]
    assert bad_of(tmp_path / "s.feather") == [(1, "invalid_utf8"), (2, "null_text")]
    record = next(read_records(slices(tmp_path / "b.feather")[0], [])).records[0]
    assert (record["when"], record["image"]) == ("2020-01-02", None)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz", ".lz4"])
def test_several_streams_in_a_file_and_the_end_of_each(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(opening, "BLOCK_BYTES", 1000)
    content, path = as_lines(str(number) * 50 for number in range(100)), tmp_path / f"a.jsonl{suffix}"
    padding = b"\0" * 8 if suffix in (".gz", ".xz", ".bz2") else b""
    whole = padding.join(map(PACK[suffix], (content[:3000], content[3000:], b"", content)))
    path.write_bytes(whole + padding)
    assert len(texts_of(path)) == 200
    for broken in (whole[:-6], whole[:100], whole + b"rubbish"):
        path.write_bytes(broken)
        with pytest.raises(
            RunError, match=rf"a.jsonl{suffix}: .*near byte [\d,]+ of [\d,]+ .*truncated, damaged or not"
        ):
            texts_of(path)


FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=6) | st.sampled_from(
    ['"', '""', ",", "\n", "\n\n", 'a "b", c', " x ", "\t", "'", "\\", "\\n", "#"]
)


@given(
    st.lists(st.tuples(FIELD, FIELD), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_csv_rows_match_the_csv_module(tmp_path_factory, rows, end, quoting, tabs):
    path = tmp_path_factory.mktemp("csv") / ("a.tsv" if tabs else "a.csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator=end, quoting=quoting, delimiter="\t" if tabs else ",")
        writer.writerows([("id", "text"), *rows])
    assert texts_of(path) == [text for _, text in rows]


def test_csv_rows_match_pyarrow_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "BLOCK_BYTES", 64)
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" + as_csv([f'{number}, "{number}"\n' * number for number in range(40)]))
    judge = pyarrow.csv.read_csv(path, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
    assert texts_of(path) == judge["text"].to_pylist()


@pytest.mark.parametrize(
    ("content", "texts", "bad"),
    [
        (b"text\none\n\ntwo\n", ["one", "two"], []),
        (b"id,text\n1,one\n2\n3,x,y\n4,four\n", ["one", "four"], [(1, "wrong_columns"), (2, "wrong_columns")]),
        (b"id,text\n1,\xff\n2,two\n", ["two"], [(0, "invalid_utf8")]),
        (b'id,text\n1,"a"b\n2,two\n', ["two"], [(0, "malformed_csv")]),
        (b'id,text\n1,one\n2,"never closed\n3,three\n', ["one"], [(1, "malformed_csv")]),
        (b"id,body\n1,one\n", [], [(0, "missing_field")]),
        (b"id,text\n", [], []),
        (b"", [], []),
    ],
)
def test_unreadable_csv_rows(tmp_path, content, texts, bad):
    (tmp_path / "a.csv").write_bytes(content)
    assert (texts_of(tmp_path), bad_of(tmp_path)) == (texts, bad)


def test_a_csv_text_of_any_length(tmp_path):
    (tmp_path / "a.csv").write_bytes(as_csv(["x" * 3_000_000]))
    assert [len(text) for text in texts_of(tmp_path)] == [3_000_000]


@pytest.mark.parametrize("content", [b"id,text,text\n1,2,3\n", b'id,"te"xt\n1,2\n'])
def test_column_names_that_cannot_be_used(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.csv: .*column"):
        texts_of(tmp_path)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize(
    ("document_per", "texts", "bad"),
    [("file", ["\none\r\ntwo é\n\n  three"], []), ("line", ["one", "two é", "  three"], [])],
)
def test_plain_text(tmp_path, suffix, document_per, texts, bad):
    (tmp_path / f"a.txt{suffix}").write_bytes(PACK[suffix](b"\xef\xbb\xbf" + "\none\r\ntwo é\n\n  three".encode()))
    assert texts_of(tmp_path, document_per=document_per) == texts


def test_plain_text_that_is_blank_or_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" \n\n")
    (tmp_path / "b.txt").write_bytes(b"one\ncaf\xe9\n")
    assert (texts_of(tmp_path), bad_of(tmp_path)) == ([], [(0, "invalid_utf8")])
    assert texts_of(tmp_path, document_per="line") == ["one"]
    (part,) = slices(tmp_path / "b.txt", document_per="line")
    assert place_of(part, 1).endswith("b.txt:2")


def tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    return file.getvalue()


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", as_lines(TEXTS))
    return file.getvalue()


class Keys(encryption.KmsClient):
    """Wraps keys in nothing."""

    def __init__(self):
        super().__init__()

    def wrap_key(self, key, _):
        return key.hex()


def encrypted(plaintext_footer):
    table, file = pa.table({"text": TEXTS, "id": range(len(TEXTS))}), pa.BufferOutputStream()
    chosen = encryption.EncryptionConfiguration("f", column_keys={"c": ["text"]}, plaintext_footer=plaintext_footer)
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), chosen)
    with pq.ParquetWriter(file, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return file.getvalue().to_pybytes()


def as_parquet():
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": TEXTS}), file)
    return file.getvalue().to_pybytes()


LINES = as_lines(TEXTS)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
OTHERS = {
    "gzip": (gzip.compress(LINES), "name it a{}.gz"),
    "zstd": (zstandard.compress(LINES), "name it a{}.zst"),
    "bzip2": (bz2.compress(LINES), "name it a{}.bz2"),
    "xz": (lzma.compress(LINES), "name it a{}.xz"),
    "LZ4": (lz4.frame.compress(LINES), "name it a{}.lz4"),
    "Parquet": (as_parquet(), "name it a.parquet"),
    "Arrow IPC": (as_arrow(TEXTS), "name it a.arrow"),
    "a tar archive": (tar(), "unpack it"),
    "a zip archive": (zipped(), "unpack it"),
    "UTF-16": (LINES.decode().encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "UTF-16 ": (LINES.decode().encode("utf-16-be"), "iconv -f UTF-16 -t UTF-8"),
    "UTF-32": (LINES.decode().encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
    "UTF-32 ": (LINES.decode().encode("utf-32-be"), "iconv -f UTF-32 -t UTF-8"),
    "a pointer of Git LFS": (POINTER, "git lfs pull"),
    "encrypted Parquet": (b"PARE\x15\x00", "write it again without encryption"),
    "a PDF file": (b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n", "extract its text"),
    "an RTF file": (rb"{\rtf1\ansi\deff0 {\fonttbl {\f0 Times;}} text}", "extract its text"),
}


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".txt"])
@pytest.mark.parametrize("kind", OTHERS)
def test_file_with_a_wrong_suffix_is_rejected_by_name(tmp_path, kind, ending):
    content, remedy = OTHERS[kind]
    (tmp_path / f"a{ending}").write_bytes(content)
    with pytest.raises(InputError, match=f"a{ending}: holds {kind.strip()}, not .*{remedy.format(ending)}"):
        slices(tmp_path)
    (tmp_path / f"a{ending}").rename(tmp_path / f"b{ending}.gz")
    (tmp_path / f"b{ending}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(InputError, match=f"b{ending}.gz: holds {kind.strip()} inside gzip"):
        texts_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'[{"text": "one"}, {"text": "two"}]\n', "a JSON array, not JSON Lines; end its name in .json"),
        ("a.jsonl.gz", b'\xef\xbb\xbf[\n  {"text": "one"}\n]', "a JSON array, not JSON Lines; end its name in .json"),
        ("a.json", b'{\n "text": "one"\n}\n{\n "text": "two"\n}\n', "an object over several lines, .* `jq -c .`"),
        ("a.jsonl", LINES.replace(b"\n", b""), "several objects in one line, not JSON Lines; write one object a line"),
        (
            "a.jsonl",
            LINES.replace(b"\n", b"\r"),
            "several objects in one line, not JSON Lines; write one object a line",
        ),
        ("a.ndjson", b"\n<!DOCTYPE html><html></html>", "an HTML page, not JSON Lines; fetch the file again"),
        ("a.parquet", POINTER, "a pointer of Git LFS, not Parquet; fetch its content: git lfs pull"),
        ("a.parquet", gzip.compress(LINES), "gzip, not Parquet; unpack it"),
        ("a.parquet", CONTENTS[".arrow"], "Arrow IPC, not Parquet; name it a.arrow"),
        ("a.arrow", POINTER, "a pointer of Git LFS, not arrow; fetch its content: git lfs pull"),
        ("a.jsonl.zst", POINTER, "a pointer of Git LFS, not zstd; fetch its content: git lfs pull"),
        ("a.jsonl.bz2", gzip.compress(LINES), "gzip, not bz2; name it a.jsonl.gz"),
        ("a.parquet", encrypted(plaintext_footer=False), "encrypted Parquet, .*write it again without encryption"),
        ("a.parquet", encrypted(plaintext_footer=True), "encrypted columns; write it again without encryption"),
    ],
)
def test_files_without_readable_rows(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(gzip.compress(content) if name == "a.jsonl.gz" else content)
    with pytest.raises(InputError, match=f"{name}: holds {said}"):
        texts_of(tmp_path / name)


def test_encrypted_columns_of_an_object_store(memory):
    memory.pipe("/corpus/a.parquet", encrypted(plaintext_footer=True))
    with pytest.raises(InputError, match=r"memory://corpus/a\.parquet: holds encrypted columns"):
        texts_of("memory://corpus/a.parquet")


@pytest.mark.parametrize(
    "row", ['{"text": "}{\\"a\\": }{"}', '{"text": "a", "b": [{"c": {}}, {"d": 1}]}', '{"text": "["}']
)
def test_lines_that_only_resemble_something_else_are_read(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(row)
    assert texts_of(tmp_path) == [json.loads(row)["text"]]


@pytest.mark.parametrize("text", ["PAR1 is a magic number", "ORC army", "PK", "BZh9", "7z", "x", "\x01\x02", "Obj"])
def test_text_that_only_resembles_something_else_is_read(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert texts_of(tmp_path) == [text]


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-200], lambda content: content[:9], lambda _: b"FEA1" + bytes(50)]
)
def test_arrow_files_that_are_damaged(tmp_path, damage):
    (tmp_path / "a.arrow").write_bytes(damage(as_feather(TEXTS, "uncompressed")))
    with pytest.raises(RunError, match=r"a\.arrow: .*(truncated|Feather V1)"):
        texts_of(tmp_path)


def test_a_preparation_of_every_format(tmp_path):
    model = byte_level_bpe(tmp_path / "vocabulary")
    for ending, content in CONTENTS.items():
        (tmp_path / f"{ending[1:]}{ending}").write_bytes(content)
    (tmp_path / "txt.txt").write_text("plain")
    (tmp_path / "bad.csv").write_bytes(b"text\nx\n\xff\n")
    paths = [*(tmp_path / f"{ending[1:]}{ending}" for ending in CONTENTS), tmp_path / "txt.txt", tmp_path / "bad.csv"]
    settings = {"tokenizer": {"model": str(model)}, "holdout": {"valid": 0, "test": 0}}
    _, manifest = prepare(blend_of(*paths), tmp_path / "out", **settings)
    expected = [text for text in TEXTS if text] * len(CONTENTS) + ["plain", "x"]
    assert sorted(documents_of(tmp_path / "out", reference(model))) == sorted(expected)
    assert manifest["totals"]["dropped"] == {"empty_document": len(CONTENTS), "invalid_utf8": 1}
    (bad,) = [json.loads(line) for path in (tmp_path / "out/quarantine").rglob("*.jsonl") for line in path.open()]
    assert (bad["file"], bad["reason"]) == (str(tmp_path / "bad.csv"), "invalid_utf8")
    again, _ = prepare(blend_of(*paths), tmp_path / "out", **settings)
    assert not again.plan.pending


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        ([{"a.b": "x"}], ["x"]),
        ([{"a.b": "x", "a": "y"}, {"a.b": "z", "a": "y"}], ["x", "z"]),
        ([{"a.b": "x", "a": {"b": "y"}}], ["y"]),
        ([{"a": {"b": "y"}}], ["y"]),
    ],
)
def test_names_with_dots_are_read_alike(tmp_path, rows, texts):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"a": {"b": "other"}}) + "\n" + json.dumps(rows[0]) + "\n")
    for name, expected in {"a.jsonl": texts, "a.parquet": texts, "b.jsonl": ["other", texts[0]]}.items():
        (part,) = slices(tmp_path / name, ["a.b"])
        assert [text for batch in read_texts(part, "a.b") for text in batch.texts.to_pylist()] == expected


def test_a_column_of_nulls_drops_its_rows(tmp_path):
    model = byte_level_bpe(tmp_path / "vocabulary")
    tables = {"a": pa.table({"text": ["one"]}), "b": pa.table({"text": pa.nulls(3), "id": [1, 2, 3]})}
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
        feather.write_feather(table, tmp_path / f"{name}.feather")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    settings = {"tokenizer": {"model": str(model)}, "holdout": {"valid": 0, "test": 0}}
    _, manifest = prepare({"datasets": [{"name": "d", "path": str(tmp_path / "*.*")}]}, tmp_path / "out/o", **settings)
    assert manifest["totals"]["dropped"] == {"null_text": 6}
    assert bad_of(tmp_path / "b.feather") == [(row, "null_text") for row in range(3)]
