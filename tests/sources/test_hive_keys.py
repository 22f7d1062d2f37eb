"""Folders `key=value` give their rows a field to filter by: the same rows as pyarrow's, of every format."""

from dataclasses import replace
from urllib.parse import quote

import fsspec
import orjson
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.receipt import source_of
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.forms import survey
from tokenmill.tasks.sources.opening import SourceCorrupt

from tests.sources.test_where import slices

LANG, YEAR = ds.field("la ng"), ds.field("year")

FOLDERS = [
    f"year={year}/la%20ng={lang}"
    for year in ("2023", "2024", "007")
    for lang in ("en", quote("de/AT=x", safe=""), "__HIVE_DEFAULT_PARTITION__")
]

PREDICATES = [
    ("`la ng` == 'en'", LANG == "en"),
    ("`la ng` in ['de/AT=x', 'fr'] and n >= 1", LANG.isin(["de/AT=x", "fr"]) & (ds.field("n") >= 1)),
    ("not `la ng` == 'en'", LANG != "en"),
    ("`la ng` is null", LANG.is_null()),
    ("`la ng` is not null and year == 7", LANG.is_valid() & (YEAR == 7)),
    ("year > 2023.5 or n == 0", (YEAR > 2023.5) | (ds.field("n") == 0)),
    ("2024 > year", YEAR < 2024),
    ("length(`la ng`) between 3 and 9", LANG == "de/AT=x"),
    ("`la ng` == 'fr'", LANG == "fr"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same rows as Parquet and as JSON Lines, three in each partition; texts name their places."""
    root = tmp_path_factory.mktemp("hive")
    for number, folder in enumerate(FOLDERS):
        rows = [{"text": f"{number}-{n}", "n": n} for n in range(3)]
        for kind in ("parquet", "jsonl"):
            (root / kind / folder).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), root / "parquet" / folder / "part-0.parquet")
        (root / "jsonl" / folder / "part-0.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return root


def read(parts):
    """The texts that are kept, sorted; every other row is counted as filtered."""
    batches = [batch for part in parts for batch in read_texts(part, "text")]
    texts = [text for batch in batches for text in batch.texts.to_pylist()]
    assert len(texts) + sum(batch.filtered for batch in batches) == sum(batch.consumed for batch in batches)
    assert not any(batch.bad for batch in batches)
    return sorted(texts), sum(batch.consumed for batch in batches)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("where", "expected"), PREDICATES)
def test_keys_of_folders_in_predicates(folders, kind, where, expected):
    kept = ds.dataset(folders / "parquet", partitioning="hive").to_table(filter=expected)["text"].to_pylist()
    assert read(slices(folders / kind, where)) == (sorted(kept), 27)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"year": 2023}, YEAR == 2023),
        ({"year": ["007", 2024], "n": 1}, YEAR.isin([7, 2024]) & (ds.field("n") == 1)),
        ({"la ng": "en"}, LANG == "en"),
        ({"la ng": "e"}, LANG == "e"),
    ],
)
def test_keys_of_folders_in_filters(folders, kind, filters, expected):
    kept = ds.dataset(folders / "parquet", partitioning="hive").to_table(filter=expected)["text"].to_pylist()
    assert read(slices(folders / kind, **filters)) == (sorted(kept), 27)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("where", "share"), [("year == 2024", 1 / 3), ("`la ng` is null", 1 / 3), ("year < 0", 0)])
def test_the_share_that_a_plan_shows(folders, kind, where, share):
    source = DataSource(name="a", path=str(folders / kind), where=where)
    found = survey(source, slices(folders / kind, where))
    assert (found.kept_rows, found.kept_bytes) == pytest.approx((share, share), abs=0.02)


@pytest.mark.parametrize("chosen", [{"where": "lang == 'en' and n < 9"}, {"lang": "en"}])
def test_files_that_keys_exclude_are_not_read(tmp_path, chosen):
    table = pa.table({"text": ["some text"] * 50, "n": range(50)})
    for lang in ("en", "de"):
        (tmp_path / f"lang={lang}").mkdir()
        pq.write_table(table, tmp_path / f"lang={lang}/a.parquet", compression="none")
    path = tmp_path / "lang=de/a.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 100 + content[104:])
    with pytest.raises(SourceCorrupt):
        read(slices(tmp_path, "lang == 'de'"))
    texts, rows = read(slices(tmp_path, **chosen))
    assert (len(texts), rows) == (9 if "where" in chosen else 50, 100)


@pytest.mark.parametrize("place", ["memory://a=1/hive", "hf://org/hive", "hf://org/hive@main/part"])
def test_keys_of_folders_in_stores(hub, tmp_path, place):
    for lang in ("en", "de%2FAT"):
        path = tmp_path / f"part/lang={lang}/a.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b'{"text": "of %s"}\n' % lang.encode())
    hub.dataset("org/hive").commit(tmp_path)
    fsspec.filesystem("memory").put(str(tmp_path / "part"), "/a=1/hive", recursive=True)
    assert read(slices(place, "lang == 'de/AT'")) == (["of de%2FAT"], 2)


def test_only_folders_below_the_dataset_are_keys(folders):
    below = folders / "parquet/year=2023"
    assert len(read(slices(below, "`la ng` == 'en'"))[0]) == 3
    assert len(read(slices(folders / "parquet/year=*/*/*.parquet", "year == 7 and n == 0"))[0]) == 3
    with pytest.raises(InputError, match=r"unknown field 'year'; known: "):
        slices(below, "year == 2023")
    with pytest.raises(InputError, match="field 'year' is part of the file's path"):
        slices(folders / "parquet", "year.month == 1")
    with pytest.raises(InputError, match='"007" is text and true is a boolean'):
        slices(folders / "parquet", "year == true")


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_fields_of_rows_win_over_keys(tmp_path, ending):
    (tmp_path / "lang=en").mkdir()
    rows = [{"text": "a", "lang": "fr"}, {"text": "b", "lang": None}]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "lang=en/a.parquet")
    else:
        (tmp_path / "lang=en/a.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    for where, lang, kept in (("lang == 'fr'", "fr", ["a"]), ("lang == 'en'", "en", []), ("lang is null", None, ["b"])):
        assert read(slices(tmp_path, where))[0] == kept
        assert lang is None or read(slices(tmp_path, lang=lang))[0] == kept


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_keys_are_part_of_what_shards_are_called(tmp_path, ending):
    def source(folder, **chosen):
        path = tmp_path / folder / f"a.{ending}"
        path.parent.mkdir(parents=True)
        if ending == "parquet":
            pq.write_table(pa.table({"text": ["a"], "n": [1]}), path)
        else:
            path.write_bytes(b'{"text":"a","n":1}\n')
        (part,) = slices(path.parents[1], **chosen)
        return source_of(part, {})

    by_lang = {"where": "lang != 'fr'"}
    keyed = [source("1/lang=en", **by_lang), source("2/lang=de", **by_lang), source("3/lang=en", **by_lang)]
    assert keyed[0] != keyed[1]
    assert keyed[0] == keyed[2]
    assert source("4/lang=en", where="n == 1") == source("5/plain", where="n == 1")
    assert source("6/lang=en") == source("7/plain")


def test_keys_of_every_file_of_a_bundle_are_part_of_its_name(folders):
    first, second = slices(folders / "jsonl", "year > 0")[:4:3]
    bundles = [replace(first, members=members) for members in ((first, first), (first, second))]
    assert first.keys != second.keys
    assert source_of(bundles[0], {}) != source_of(bundles[1], {})
