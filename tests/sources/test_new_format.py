"""The source format that CONTRIBUTING.md shows is whole: registering it is all that a preparation needs."""

import gzip
import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources import formats, opening
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.slices import cut

from tests.preparing import documents_of, prepare
from tests.tokenize.small_vocabularies import byte_level_bpe, reference

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """The file of the guide, as a module whose format is registered."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A new source format")[2]
    source = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    path = tmp_path / "fasta.py"
    path.write_text(source)
    module = module_from_spec(spec := spec_from_file_location("fasta", path))
    spec.loader.exec_module(module)
    monkeypatch.setattr(opening, "BLOCK_BYTES", 1_000)  # several blocks a file
    monkeypatch.setitem(formats.FORMATS, "fasta", None)
    before = dict(formats.ENDINGS)
    formats.register(module.Fasta())
    yield
    formats.ENDINGS.clear()
    formats.ENDINGS.update(before)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.fasta").write_bytes(b"lost\n>1\no\nne\n>2\n\xff\n>3\nt\xc3\xa9")
    (folder / "b.fasta.gz").write_bytes(gzip.compress(b"".join(b">7\nrow\n%d\n" % n for n in range(500))))
    (folder / "notes.md").write_text("skipped")
    return folder


def test_a_registered_format_is_prepared_from_discovery_to_receipt(registered, data, tmp_path):
    model = byte_level_bpe(tmp_path / "vocabulary")
    blend = {"datasets": [{"name": "proteins", "path": str(data)}]}
    settings = {"tokenizer": {"model": str(model)}, "holdout": {"valid": 0, "test": 0}}
    planned, manifest = prepare(blend, tmp_path / "out", **settings)
    assert [shard.identity["source"]["format"] for shard in planned.plan.shards] == ["fasta", "fasta"]
    found = documents_of(tmp_path / "out", reference(model))
    assert found == ["one", "t\xe9", *(f"row{number}" for number in range(500))]
    assert manifest["skipped_files"] == {"datasets/proteins": {".md": 1}}
    first = planned.plan.store.receipt(planned.plan.shards[0].key)
    assert (first.rows_in, dict(first.drops)) == (4, {"invalid_utf8": 1, "no_name": 1})
    bad = [json.loads(line) for path in (tmp_path / "out/quarantine").rglob("*.jsonl") for line in path.open()]
    assert {row["reason"] for row in bad} == {"no_name", "invalid_utf8"}
    again, _ = prepare(blend, tmp_path / "out", **settings)
    assert not again.plan.pending
    samples, _ = prepare(blend, tmp_path / "sample", sample=3, **settings)
    assert [shard.part.rows for shard in samples.plan.shards] == [3]


def test_a_registered_format_gives_records_and_is_named_in_errors(registered, data):
    (file,) = discover(DataSource(name="a", path=str(data / "b.fasta.gz")))
    (part,) = cut(file, 1000, ["text"])
    assert next(read_records(part, ["text"])).records[0] == {"text": "row0", "name": "7"}
    with pytest.raises(InputError, match=r"supported are .*\.fasta, also followed by"):
        discover(DataSource(name="a", path=str(data / "notes.md")))


def test_a_format_that_is_not_registered_is_unknown(data):
    with pytest.raises(InputError, match=r"b\.fasta\.gz: files of this type cannot be read"):
        discover(DataSource(name="a", path=str(data / "b.fasta.gz")))
