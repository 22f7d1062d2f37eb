"""`tokenmill.open`: documents, packs and rows equal the published files, and each leads to its source row."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenmill
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.kinds import preparation

from tests.kinds.preparations import sample
from tests.preparing import documents_of
from tests.tokenize.small_vocabularies import EOS, reference

pytestmark = pytest.mark.slow

FORMATS = {
    "pretrain": "documents", "sft": "packs", "rl": "lines", "dedup": "lines", "filter": "lines", "harmony": "parquet",
}  # fmt: skip
TEXTS = {"dedup": "text", "filter": "text", "rl": "uuid"}
"""A field that rows keep."""


@pytest.fixture(scope="module", params=FORMATS)
def opened(request, tmp_path_factory):
    with sample(request.param, tmp_path_factory.mktemp(request.param)) as made:
        _, manifest = made.run()
        yield made, manifest, tokenmill.open(made.out)


def source_line(data, part, number):
    file, line = data.origin(part, number)
    assert [fate.kept for fate in data.fate(file, line)] == [True]
    return json.loads(Path(file).read_bytes().splitlines()[line - 1])


def test_documents_packs_and_rows_lead_to_their_sources(opened):
    made, manifest, data = opened
    assert (data.type, data.format, data.path) == (made.kind, FORMATS[made.kind], str(made.out))
    counted = Counter()
    for part in data.parts():
        if data.format == "documents":
            read = list(data.documents(part))
            for number, ids in enumerate(read):
                assert data.tokenizer.decode(ids.tolist()).removesuffix(EOS) == source_line(data, part, number)["text"]
        elif data.format == "packs":
            read = {
                number for pack in data.packs(part) for number in pack.documents.tolist()
            }  # a few sequences for each
            assert all(source_line(data, part, number)["messages"] for number in read)
        else:
            read = list(data.rows(part))
            for number, row in enumerate(read):
                source, field = source_line(data, part, number), TEXTS.get(made.kind)
                assert field is None or row.get(field) == source.get(field)
        assert len(read) == part.documents or "_leading_" in part.place
        counted[part.split] += part.documents
    assert (
        list(data.splits) == [split for split in ("train", "valid", "test") if split in counted]
        or made.kind == "harmony"
    )
    assert sum(counted.values()) == sum(sum(entry["documents"].values()) for entry in manifest["shards"])


def test_documents_equal_the_files(opened):
    made, _, data = opened
    if data.format == "documents":
        for split in data.splits:
            texts = [
                data.tokenizer.decode(ids[:-1].tolist()) for part in data.parts(split) for ids in data.documents(part)
            ]
            assert sorted(texts) == sorted(documents_of(made.out, reference(made.folder / "vocabulary"), split))
    elif data.format == "packs":
        for part in data.parts():
            for pack, stored in zip(data.packs(part), pq.read_table(part.place).to_pylist(), strict=True):
                starts = set(stored["seq_start_id"])
                mask = stored["loss_mask"]
                assert pack.ids.tolist() == stored["input_ids"]
                assert pack.trained.tolist() == [at not in starts and mask[at - 1] == 1 for at in range(len(mask))]
                assert sum(map(len, data.documents(part))) <= sum(len(each.ids) for each in data.packs(part))
                assert np.array_equal(pack.starts, stored["seq_start_id"])


def test_outputs_name_their_own_readers(opened):
    _, _, data = opened
    part = data.parts()[0]
    for wanted in ("packs", "rows"):
        if wanted not in {data.format, "rows" * (preparation(data.type).tokens is None)}:
            with pytest.raises(InputError, match=f"holds {data.type} data, which has no {wanted}"):
                list(getattr(data, wanted)(part))
    with pytest.raises(InputError, match=r"split: 'trian' isn't in .*; "):
        data.parts("trian")
