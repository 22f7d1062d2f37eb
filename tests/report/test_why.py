"""The story of a row, against rows whose fate the test decides when it writes them."""

import gzip
import io
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.nightly.diff import diff
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.report.why import print_why, why_document, why_record, why_row
from tokenmill.tasks.shards.fates import FATES
from tokenmill.tasks.shards.receipt import RECEIPT, Receipt
from tokenmill.tasks.shards.verify import verify
from xxhash import xxh3_128_hexdigest

from tests import building, preparing_dedup, preparing_harmony, preparing_rl, preparing_sft
from tests.dedup.test_near import prose
from tests.preparing import blend_of, prepare
from tests.preparing_rl import write_rows
from tests.preparing_sft import chat_vocabulary
from tests.tokenize.small_vocabularies import byte_level_bpe, reference

SHARD_SIZE = 3_000

BAD = {"blank_line": [b"", b"  ", b"\t\r"], "malformed_json": [b'{"text": "row'], "not_an_object": [b"[1]"]}
TEXTS = {
    "missing_field": [b'{"body": "x"}'],
    "null_text": [b'{"text": null}'],
    "too_short": [b'{"text": "short"}', b'{"text": ""}'],
}


def sentence(number):
    """A text that no other row has."""
    return f"row {number} tells a story that nobody else tells, about the number {str(number) * 2}"


class Source:
    """A file of rows in random order: `fates` has for each line the reason why it is dropped, None for a good one."""

    def __init__(self, path, good, bad, seed=1):
        chosen = random.Random(seed)
        rows = [(row, None) for row in good] + [(row, reason) for reason, rows in bad.items() for row in rows * 5]
        chosen.shuffle(rows)
        self.path = Path(path)
        write_rows(self.path, [row for row, _ in rows])
        if self.path.suffix == ".gz":
            self.path.write_bytes(gzip.compress(self.path.read_bytes()))
        self.rows, self.fates = zip(*rows, strict=True)

    def sample(self, count):
        """Random rows, at least one of every fate."""
        chosen = random.Random(0).sample(range(len(self.rows)), min(count, len(self.rows)))
        return sorted({*chosen, *(self.fates.index(fate) for fate in self.fates)})


@pytest.fixture(params=[30, pytest.param(200, marks=pytest.mark.slow)])
def count(request):
    return request.param


def only(stories):
    ((fate,),) = stories
    return fate


def asserted(out, source, row):
    """The fate of a row, which must be that of the source; its document id must lead to the same."""
    fate = only(why_row(str(out), f"{source.path}:{row + 1}"))
    assert (fate.file, fate.line) == (str(source.path), row + 1)
    assert (fate.kept, fate.reason) == (source.fates[row] is None, source.fates[row])
    if fate.kept:
        assert why_document(str(out), fate.document) == [[fate]]
    return fate


def document_ids(place):
    """The token ids of a document, read by NumPy alone."""
    index = Path(f"{place.name}.idx").read_bytes()
    lengths = np.frombuffer(index, "<i4", int.from_bytes(index[18:26], "little"), 34)
    return np.split(np.fromfile(f"{place.name}.bin", "<u2"), np.cumsum(lengths)[:-1])[place.published_number]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def decode(vocabulary):
    return reference(vocabulary).decode


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, vocabulary):
    folder = tmp_path_factory.mktemp("pretrain")
    good = [{"text": sentence(number)} for number in range(120)]
    sources = [
        Source(folder / "plain.jsonl", good[:60], BAD | TEXTS),
        Source(folder / "packed.jsonl.gz", good[60:], BAD | TEXTS),
    ]
    chosen = {"tokenizer": {"model": str(vocabulary)}, "shard_size": SHARD_SIZE, "max_bad_row_fraction": 0.9}
    chosen |= {"min_doc_chars": 6, "holdout": {"valid": 0.2, "test": 0.2}}
    few = [{"text": sentence(1_000 + number)} for number in range(100)]
    parts = [(BAD if number % 2 else TEXTS) if number < 2 else {} for number in range(20)]
    small = [
        Source(folder / f"small/{number:02d}.jsonl", few[5 * number : 5 * number + 5], bad)
        for number, bad in enumerate(parts)
    ]
    blend = blend_of(*(source.path for source in sources), folder / "small")
    _, manifest = prepare(blend, folder / "out", **chosen)
    assert any(len(entry.get("files", [])) > 1 for entry in manifest["shards"]), "small files share shards"
    return folder / "out", [*sources, *small[:5], small[-1]]


@pytest.mark.slow
def test_the_fates_of_rows_for_pretraining(pretrained, decode, count):
    out, sources = pretrained
    seen = set()
    for source in sources:
        for row in source.sample(count):
            fate = asserted(out, source, row)
            seen.add(fate.split or fate.reason)
            if fate.kept:
                (place,) = fate.places
                ids = document_ids(place)
                assert Path(place.name).parent.name == fate.split
                assert place.tokens == len(ids)
                assert decode(ids[:-1]) == source.rows[row]["text"]
    assert seen == {"train", "valid", "test", *BAD, *TEXTS}


def talk(number, words=1, **fields):
    content = " ".join([sentence(number)] * words)
    return {
        "messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": content}],
        **fields,
    }


FILTERED = {"filtered": [talk(9999, license="none")]}


def test_the_fates_of_rows_in_packs(tmp_path, count):
    model = chat_vocabulary(tmp_path / "vocabulary")
    tokens = reference(model)
    bad = BAD | FILTERED | {"oversize": [talk(8888, 20, license="mit")], "no_messages": [{"license": "mit"}]}
    source = Source(tmp_path / "a.jsonl", [talk(number, license="mit") for number in range(60)], bad)
    blend = {"datasets": [{"name": "a", "path": str(source.path), "filters": {"license": "mit"}}]}
    held_out = {"valid": 0.2, "test": 0.2}
    chosen = {"tokenizer": {"model": str(model)}, "pack_size": 300, "holdout": held_out, "shard_size": SHARD_SIZE}
    chosen["pad_seq_to_mult"] = 8
    preparing_sft.prepare(blend, tmp_path / "out", **chosen)
    seen = set()
    for row in source.sample(count):
        fate = asserted(tmp_path / "out", source, row)
        seen.add(fate.split or fate.reason)
        for place in fate.places:
            (pack,) = pq.read_table(place.name).slice(place.published_number, 1).to_pylist()
            assert Path(place.name).parent.name == fate.split
            question = f"<|im_start|>user\n{source.rows[row]['messages'][0]['content']}<|im_end|>"
            borders = [*pack["seq_start_id"], len(pack["input_ids"])]
            sequences = [pack["input_ids"][start:stop] for start, stop in itertools.pairwise(borders)]
            (mine,) = (ids for ids in sequences if tokens.decode(ids, skip_special_tokens=False).startswith(question))
            assert place.tokens == len(mine) - mine.count(tokens.token_to_id("<|endoftext|>")), "without padding"
    assert seen == {"train", "valid", "test", *bad}


@pytest.mark.parametrize("held_out", [{"val_holdout": 20}, {"holdout": {"valid": 0.3, "test": 0.0}}])
def test_the_fates_of_rows_for_reinforcement_learning(tmp_path, held_out, count):
    bad = BAD | FILTERED
    source = Source(tmp_path / "a.jsonl", [talk(number, license="mit") for number in range(60)], bad)
    blend = {"datasets": [{"name": "a", "path": str(source.path), "filters": {"license": "mit"}}]}
    preparing_rl.prepare(blend, tmp_path / "out", shard_size=SHARD_SIZE, **held_out)
    seen = set()
    for row in source.sample(count):
        fate = asserted(tmp_path / "out", source, row)
        seen.add(fate.split or fate.reason)
        for place in fate.places:
            lines = Path(place.name).read_text().splitlines()
            assert json.loads(lines[place.published_number]) == source.rows[row]
    assert seen == {"train", "valid", *bad}


def without_end(text):
    return " ".join(text.split()[:-3])


def with_copies(path, row_of):
    """Rows among which are copies, exact or without the last words, of others, and what is decided about each.

    Of equal texts the first is kept, of similar ones the longest. A fate is a reason and the line of the row kept instead.
    """
    generator = random.Random(3)
    texts = [prose(generator, 150) for _ in range(30)]
    copies = [*texts[:2], *map(without_end, texts[2:4]), *map(without_end, texts[2:4])]
    source = Source(path, [row_of(text) for text in texts + copies], BAD)
    longer = {without_end(text): text for text in texts}
    lines = {}
    for number, row in enumerate(source.rows):
        if isinstance(row, dict):
            lines.setdefault(row["text"], number + 1)
    fates = []
    for row, reason in zip(source.rows, source.fates, strict=True):
        if not isinstance(row, dict):
            fates.append((reason, None))
        elif lines[row["text"]] != len(fates) + 1:
            fates.append(("exact_duplicate", lines[row["text"]]))
        elif row["text"] in longer:
            fates.append(("near_duplicate", lines[longer[row["text"]]]))
        else:
            fates.append((None, None))
    source.fates = fates
    return source


@pytest.mark.parametrize("named", [{}, {"id_field": "id"}])
def test_duplicates_and_the_rows_kept_instead(tmp_path, named, count):
    source = with_copies(
        tmp_path / "a.jsonl", lambda text: {"text": text, "id": text[::-1]} if named else {"text": text}
    )
    outs = {mode: tmp_path / mode for mode in ("drop", "tag")}
    for mode, out in outs.items():
        preparing_dedup.prepare(blend_of(source.path), out, mode=mode, shard_size=8_000, **named)
    for row in source.sample(count):
        reason, line = source.fates[row]
        for mode, out in outs.items():
            fate = only(why_row(str(out), f"{source.path}:{row + 1}"))
            assert fate.reason == reason
            assert fate.kept is (reason is None or (mode == "tag" and line is not None))
            if named and reason == "exact_duplicate":  # equal ids name either row
                assert fate.duplicate_of.startswith(str(source.path))
            else:
                assert fate.duplicate_of == (line and f"{source.path}:{line}")
            for place in fate.places:
                found = json.loads(Path(place.name).read_text().splitlines()[place.published_number])
                assert found["text"] == source.rows[row]["text"]
    assert {reason for reason, _ in source.fates} == {None, *BAD, "exact_duplicate", "near_duplicate"}


@pytest.mark.parametrize("mode", ["drop", "tag"])
def test_rows_that_deduplication_drops_without_comparing_them(tmp_path, mode):
    rows = [{"text": "left out", "score": 1}, b"", {"text": "stays here", "score": 5}]
    source, out = write_rows(tmp_path / "in/lang=en/a.jsonl", rows), tmp_path / "out"
    blend = {"datasets": [{"name": "a", "path": str(tmp_path / "in"), "where": "score > 2 and lang == 'en'"}]}
    preparing_dedup.prepare(blend, out, mode=mode)
    fates = [only(why_row(str(out), f"{source}:{row + 1}")).reason for row in range(len(rows))]
    assert fates == ["filtered", "blank_line", None]


def test_a_row_through_deduplication_and_pretraining(tmp_path, vocabulary, decode, count):
    source = with_copies(tmp_path / "a.jsonl", lambda text: {"text": text})
    preparing_dedup.prepare(blend_of(source.path), tmp_path / "dedup", shard_size=8_000)
    out, settings = tmp_path / "out", {"tokenizer": {"model": str(vocabulary)}, "shard_size": 5_000}
    prepare(json.loads((tmp_path / "dedup/blend.json").read_text()), out, **settings)
    for row in source.sample(count):
        (story,) = why_row(str(out), f"{source.path}:{row + 1}")
        assert [fate.kept for fate in story] == ([True, True] if source.fates[row][0] is None else [False])
        assert (story[0].file, story[0].line, story[0].reason) == (str(source.path), row + 1, source.fates[row][0])
        if story[-1].kept:
            (place,) = story[-1].places
            assert decode(document_ids(place)[:-1]) == source.rows[row]["text"]
            assert why_document(str(out), story[-1].document) == [story]
            assert why_row(str(out), f"{story[1].file}:{story[1].line}") == [story]


def normalize(folder, mode, **selection):
    asked = {"role": "user", "content": "Tell me."}
    source = with_copies(
        folder / "a.jsonl",
        lambda text: {"text": text, "messages": [asked, {"role": "assistant", "content": text}], "license": "mit"},
    )
    blend = {"datasets": [{"name": "a", "path": str(source.path), "converter": "openai_messages"}]}
    preparing_harmony.prepare(blend, folder / mode, dedup={"mode": mode}, shard_size=8_000, selection=selection)
    if mode == "off":
        source.fates = [(None if line else reason, None) for reason, line in source.fates]
    return source


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["drop", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("tag", "off"))])
def test_the_fates_of_rows_in_harmony(tmp_path, mode, count):
    source = normalize(tmp_path, mode)
    for row in source.sample(count):
        reason, line = source.fates[row]
        fate = only(why_row(str(tmp_path / mode), f"{source.path}:{row + 1}"))
        assert (fate.reason, fate.duplicate_of) == (reason, line and f"{source.path}:{line}")
        assert fate.kept is (reason is None or (mode == "tag" and line is not None))
        for place in fate.places:
            (found,) = pq.read_table(place.name).slice(place.published_number, 1).to_pylist()
            assert source.rows[row]["text"] in found["text"]
        if fate.kept:
            assert why_document(str(tmp_path / mode), fate.document) == [[fate]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tag", "drop"])
@pytest.mark.parametrize("pools", [False, True])
def test_a_row_through_harmony_and_packing(tmp_path, mode, pools):
    source = normalize(tmp_path, mode, materialize=pools)
    out, blend = tmp_path / "packs", json.loads((tmp_path / mode / "blend.json").read_text())
    if pools:
        places = sorted(each for each in (tmp_path / mode / "pools").iterdir() if each.is_dir())
        blend = {"datasets": [{"name": f"pool{number}", "path": str(place)} for number, place in enumerate(places)]}
    settings = {"chat_template": "harmony", "tokenizer": {"model": "o200k_harmony"}, "pack_size": 4096}
    preparing_sft.prepare(blend, out, **settings)
    packed = 0
    for row in source.sample(200):
        for story in why_row(str(out), f"{source.path}:{row + 1}"):
            assert story[0].reason == source.fates[row][0]
            if not story[0].kept:
                assert len(story) == 1
            elif len(story) == 2:
                packed += 1
                assert story in why_document(str(out), story[1].document)
                assert story[1].kept
    kept = sum(reason is None or (mode == "tag" and line is not None) for reason, line in source.fates)
    assert packed == kept if not pools else packed


@pytest.mark.slow
def test_rows_from_parquet_and_arrays(tmp_path, vocabulary, decode):
    texts = [sentence(number) if number % 3 else "" for number in range(60)]
    nulls = [text if number % 7 else None for number, text in enumerate(texts)]
    pq.write_table(pa.table({"text": nulls}), tmp_path / "a.parquet", row_group_size=10)
    (tmp_path / "b.json").write_text(json.dumps([{"text": text} for text in nulls], indent=1))
    out = tmp_path / "out"
    settings = {
        "tokenizer": {"model": str(vocabulary)},
        "shard_size": 400,
        "max_bad_row_fraction": 1,
        "min_doc_chars": 8,
    }
    prepare(blend_of(tmp_path / "a.parquet", tmp_path / "b.json"), out, **settings)
    for name in ("a.parquet", "b.json"):
        for row, text in enumerate(nulls):
            fate = only(why_row(str(out), f"{name}:{row + 1}"))
            assert fate.reason == ("null_text" if text is None else "too_short" if not text else None)
            if fate.kept:
                assert decode(document_ids(fate.places[0])[:-1]) == text


def without_reasons(out):
    """Write the fates of all shards as an earlier version did: 2 bits a row, the first in the lowest, 0 for a dropped row."""
    for path in Path(out).rglob(FATES):
        codes = [code if code < 4 else 0 for code in path.read_bytes()]
        bits = "".join(f"{code:02b}" for code in reversed(codes))
        path.write_bytes(int(bits, 2).to_bytes(-(-len(codes) // 4), "little"))
        receipt, size = Receipt.load(path.with_name(RECEIPT).read_bytes()), path.stat().st_size
        digest = xxh3_128_hexdigest(path.read_bytes())
        receipt.outputs[:] = [
            replace(each, size=size, xxh3_128=digest) if each.path == FATES else each for each in receipt.outputs
        ]
        path.with_name(RECEIPT).write_bytes(receipt.dump())


def test_a_changed_source_and_shards_of_an_earlier_version(tmp_path, vocabulary):
    rows = [b"", {"text": ""}, {"text": sentence(1)}, b"{"]
    source, out = write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out"
    prepare(blend_of(source), out, tokenizer={"model": str(vocabulary)}, max_bad_row_fraction=1)
    source.unlink()
    reasons = ["blank_line", "empty_document", None, "malformed_json"]
    assert [only(why_row(str(out), f"a.jsonl:{line}")).reason for line in (1, 2, 3, 4)] == reasons
    without_reasons(out)
    fates = [only(why_row(str(out), f"a.jsonl:{line}")) for line in (1, 2, 3, 4)]
    assert [fate.reason for fate in fates] == [None, None, None, "malformed_json"]
    assert [fate.kept for fate in fates] == [False, False, True, False]
    assert all("isn't recorded; prepare the data again" in fate.detail for fate in fates[:2])
    assert verify(str(out), inspector_of("pretrain")).problems == []
    found = diff(str(out), str(out))
    assert found.documents == (1, 1)
    write_rows(source, rows)
    settings = {"tokenizer": {"model": str(vocabulary)}, "store": str(out / "shards")}
    assert building.plan_here("pretrain", blend_of(source), tmp_path / "again", **settings).plan.pending == []


def test_a_row_that_is_read_twice_has_two_stories(tmp_path, vocabulary):
    source = write_rows(tmp_path / "a.jsonl", [{"text": sentence(number)} for number in range(5)])
    sources = [{"name": name, "path": str(source), "weight": weight} for name, weight in (("one", 1), ("two", 0))]
    prepare({"train": sources}, tmp_path / "out", tokenizer={"model": str(vocabulary)})
    stories = why_row(str(tmp_path / "out"), f"{source}:3")
    assert [(fate.dataset, fate.weight, len(fate.places)) for (fate,) in stories] == [("one", 1, 1), ("two", 0, 1)]
    assert stories[0][0].places[0].name != stories[1][0].places[0].name


WRONG = {
    "plain.jsonl": "is not FILE:LINE",
    "plain.jsonl:0": "is not FILE:LINE",
    "plain.jsonl:1000": "plain.jsonl has only",
    "plane.jsonl:1": "did you mean .*/plain.jsonl",
    "nothing:1": "the sources are .*packed.jsonl.gz, .*plain.jsonl",
}


@pytest.mark.parametrize("row", WRONG)
def test_a_row_that_is_not_there(pretrained, row):
    with pytest.raises(InputError, match=f"--row: .*{WRONG[row]}"):
        why_row(str(pretrained[0]), row)


def test_ambiguous_file_is_reported(tmp_path, vocabulary, monkeypatch):
    for folder in ("a", "b"):
        write_rows(tmp_path / folder / "x.jsonl", [{"text": sentence(folder)}])
    sources = [{"name": folder, "path": str(tmp_path / folder)} for folder in ("a", "b")]
    prepare({"datasets": sources}, tmp_path / "out", tokenizer={"model": str(vocabulary)})
    with pytest.raises(InputError, match=r"'x.jsonl' is the end of .*a/x.jsonl, .*b/x.jsonl; write more"):
        why_row(str(tmp_path / "out"), "x.jsonl:1")
    assert only(why_row(str(tmp_path / "out"), "b/x.jsonl:1")).dataset == "b"
    monkeypatch.chdir(tmp_path / "a")
    assert only(why_row(str(tmp_path / "out"), "x.jsonl:1")).dataset == "a", "the one in the working folder"


@pytest.mark.parametrize("document", ["x", "00000000-1", "{key}-train-9999", "{key}-other-1", "{key}-999999"])
def test_a_document_that_is_not_there(pretrained, document):
    key = only(why_row(str(pretrained[0]), "plain.jsonl:1")).key
    with pytest.raises(InputError, match="--doc: "):
        why_document(str(pretrained[0]), document.format(key=key))


def test_it_is_printed_and_recorded(pretrained):
    out, (source, _, *_) = pretrained
    printed = io.StringIO()
    for row in (source.fates.index(None), source.fates.index("blank_line"), source.fates.index("malformed_json")):
        stories = why_row(str(out), f"{source.path}:{row + 1}")
        print_why(str(out), stories, Console(file=printed, width=400))
        record = json.loads(json.dumps(why_record(str(out), stories)))["why"]
        assert (record["path"], record["type"]) == (str(out), "pretrain")
        assert record["stories"][0][0]["kept"] is (source.fates[row] is None)
    text = printed.getvalue()
    assert f"{source.path}:{source.fates.index(None) + 1}\n" in text
    assert "kept as document" in text
    assert "dropped: blank_line" in text
    assert "dropped: malformed_json: unexpected end" in text
