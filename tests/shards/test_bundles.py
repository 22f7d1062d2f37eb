"""Small files share shards: few of them, cut by content, and every row still leads to its file and line."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.nightly.changes import plan_changes
from tokenmill.tasks.report.plan import plan_record
from tokenmill.tasks.report.view import view_output
from tokenmill.tasks.shards import planning
from tokenmill.tasks.shards.build import BadRowError
from tokenmill.tasks.shards.manifest import identities
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.planning import bundle, groups_by_content
from tokenmill.tasks.shards.receipt import InvalidReceiptError, Receipt, shard_identity, shard_key
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import format_of, place_of
from tokenmill.tasks.tokenize.kind import PRETRAIN
from tokenmill.tasks.tokenize.settings import PretrainRecipe
from xxhash import xxh3_128_hexdigest

from tests.building import plan_here
from tests.examples import max_examples
from tests.preparing import blend_of, build_pending, prepare, write_lines
from tests.preparing_sft import chat_vocabulary
from tests.preparing_sft import prepare as prepare_sft
from tests.tokenize.small_vocabularies import EOS, byte_level_bpe

SHARD_SIZE = 1_000_000

RECIPE = PretrainRecipe(
    text_field="text", tokenizer="t", vocabulary_size=9, backend="reference", bos=None, eos=1,
    special_tokens_in_text="literal", min_doc_chars=None, max_doc_tokens=None,
    holdout_valid=0.0, holdout_test=0.0, holdout_seed=None,
)  # fmt: skip


def shard_of(number, size=200, recipe=RECIPE, **changes):
    """The shard of a file by itself, as it is planned without bundles."""
    content = xxh3_128_hexdigest(str(number).encode())
    file = SourceFile(f"/data/{number}.jsonl", size, **{"format": "jsonl", **changes})
    part = Slice(file, 0, size, f"xxh3_128:{content}", size=size)
    return PlannedShard("web", "datasets", part, shard_identity("pretrain", 2, recipe, part))


def sizes(seed, count):
    """Sizes of files: tiny, or of all magnitudes up to half a shard."""
    source = random.Random(seed)
    return [source.choice([200, 5_000]) if seed % 2 else int(10 ** source.uniform(2, 5.7)) for _ in range(count)]


def keys_of(shards):
    return [bundle(group).key for group in groups_by_content(shards, SHARD_SIZE)]


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(0, 3_000), st.sampled_from([200, 40_000, 300_000]), st.integers(0, 2**32))
def test_a_file_more_or_less_among_thousands_changes_at_most_three_shards(seed, place, size, number):
    fewer = [shard_of((seed, each), size) for each, size in enumerate(sizes(seed, 3_000))]
    more = [*fewer[:place], shard_of(number, size), *fewer[place:]]
    one, other = keys_of(fewer), keys_of(more)
    assert len(set(other) - set(one)) <= 3
    assert len(set(one) - set(other)) <= 3


@pytest.mark.slow
@given(st.integers(0, 2**32))
@max_examples(50)
def test_bundles_are_few_bounded_and_in_order(seed):
    shards = [shard_of((seed, number), size) for number, size in enumerate(sizes(seed, 3_000))]
    groups = list(groups_by_content(shards, SHARD_SIZE))
    assert [shard for group in groups for shard in group] == shards
    totals = [sum(shard.part.size for shard in group) for group in groups if len(group) > 1]
    assert max(totals) <= SHARD_SIZE
    assert max(map(len, groups)) <= planning.MOST_FILES
    everything = sum(shard.part.size for shard in shards)
    assert len(groups) < 8 * everything / SHARD_SIZE + 12


def test_the_place_of_a_file_does_not_matter():
    """The same contents under other names give the same shards."""
    moved = [
        PlannedShard(
            "other", "train", Slice(SourceFile(f"/b{n:04}", 200, "jsonl"), 0, 200, s.part.content, size=200), s.identity
        )
        for n, s in enumerate(shard_of(n) for n in range(500))
    ]
    assert keys_of(moved) == keys_of([shard_of(n) for n in range(500)])


@pytest.mark.parametrize(
    "other",
    [
        shard_of("large", SHARD_SIZE // 2),
        shard_of("zipped", compression="gzip"),
        shard_of("columns", format="parquet"),
        shard_of("recipe", recipe=replace(RECIPE, eos=2)),
    ],
    ids=["large", "compression", "format", "recipe"],
)
def test_file_with_a_different_recipe_keeps_its_own_shard(other):
    """Its key is what it was before there were bundles."""
    small = [shard_of(number) for number in range(3)]
    assert [other] in list(groups_by_content([*small[:2], other, small[2]], SHARD_SIZE))
    assert bundle([other]) == other


def test_a_bundle_is_never_read_as_its_first_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["one"])
    shard = bundle([shard_of(number) for number in range(3)])
    part = Slice(SourceFile(str(tmp_path / "a.jsonl"), 16, "jsonl"), 0, 16, members=shard.part.members)
    with pytest.raises(ValueError, match="begins a bundle"):
        list(format_of(part.file).texts(part, "text"))


ROWS = {
    "good": lambda word: json.dumps({"text": word}).encode(),
    "blank_line": lambda _: b" ",
    "malformed_json": lambda word: f'{{"text": {word}'.encode(),
    "null_text": lambda _: b'{"text": null}',
    "empty_document": lambda _: b'{"text": ""}',
}


def write_file(path, fates, words):
    """A file of any format with rows of these fates; returns the fates that its format can hold, and the texts."""
    if path.suffix == ".jsonl" or path.name.endswith(".jsonl.gz"):
        content = b"".join(ROWS[fate](word) + b"\n" for fate, word in zip(fates, words, strict=True))
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        return fates
    fates = ["good" if fate in {"blank_line", "malformed_json"} else fate for fate in fates]
    if path.suffix == ".json":
        path.write_bytes(b"[%s]" % b",\n".join(ROWS[fate](word) for fate, word in zip(fates, words, strict=True)))
        return fates
    texts = [
        {"good": word, "null_text": None, "empty_document": ""}[fate] for fate, word in zip(fates, words, strict=True)
    ]
    kind = pa.string() if len(fates) % 2 else pa.large_string()
    pq.write_table(pa.table({"text": pa.array(texts, kind), "n": list(range(len(texts)))}), path, row_group_size=2)
    return fates


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), size=300))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, model):
    """A folder of small files of every format and one large one, prepared; and every row's file, line and fate."""
    folder, source = tmp_path_factory.mktemp("mixed"), random.Random(7)
    (folder / "in").mkdir()
    rows = []
    for number in range(60):
        name = f"{number // 15}-{number:02}.{('jsonl', 'json', 'parquet', 'jsonl.gz')[number // 15]}"
        fates = source.choices([*ROWS], [9, 1, 1, 1, 1], k=200 if number == 7 else source.randrange(1, 6))
        words = [f"word {number} {row}" for row in range(len(fates))]
        fates = write_file(folder / "in" / name, fates, words)
        rows += [(name, line, *each) for line, each in enumerate(zip(fates, words, strict=True), 1)]
    settings = {"tokenizer": {"model": model}, "holdout": {"valid": 0.2, "test": 0.1}, "max_bad_row_fraction": 0.5}
    planned, manifest = prepare(blend_of(folder / "in"), folder / "out", shard_size=6_000, **settings)
    return planned, manifest, rows, folder


def test_every_format_is_bundled_and_a_large_file_is_not(mixed):
    planned, _, _, _ = mixed
    bundled = [shard.part for shard in planned.plan.shards if shard.part.members]
    assert {(part.file.format, part.file.compression) for part in bundled} == {
        ("jsonl", None), ("json", None), ("parquet", None), ("jsonl", "gzip")
    }  # fmt: skip
    assert all(len({(each.file.format, each.file.compression) for each in part.members}) == 1 for part in bundled)
    alone = {Path(shard.part.file.uri).name for shard in planned.plan.shards if not shard.part.members}
    assert "0-07.jsonl" in alone
    record = plan_record(planned)["plan"]
    assert record["files"] == 60
    assert record["shards"]["total"] == len(planned.plan.shards) < 40


def test_bad_rows_in_bundles_name_file_and_line(mixed):
    _, manifest, rows, folder = mixed
    lines = (folder / "out/quarantine/in.jsonl").read_text().splitlines()
    found = [(Path(row["file"]).name, row["line"], row["reason"]) for row in map(json.loads, lines)]
    assert found == [(name, line, fate) for name, line, fate, _ in rows if fate in {"malformed_json", "null_text"}]
    assert manifest["totals"]["rows"] == len(rows)


def test_view_names_the_file_and_line_of_every_document(mixed):
    *_, rows, folder = mixed
    view = view_output(str(folder / "out"), rows=len(rows))
    sequences = [sequence for pack in view.packs for sequence in pack.sequences]
    found = [(Path(each.file).name, each.line, each.passages[0].text.removesuffix(EOS)) for each in sequences]
    assert sorted(found) == sorted((name, line, word) for name, line, fate, word in rows if fate == "good")


def test_a_bundled_preparation_is_verified(mixed):
    planned, manifest, _, folder = mixed
    assert verify(str(folder / "out"), PRETRAIN.inspect).problems == []
    assert [shard_key(identity) for identity in identities(manifest).values()] == list(planned.plan.keys)
    receipt = next(each for each in planned.plan.store.proven(planned.plan.keys).values() if len(each.rows_by_file) > 1)
    with pytest.raises(InvalidReceiptError, match="its files have"):
        Receipt(**{**{name: getattr(receipt, name) for name in Receipt.__slots__}, "facts": {"rows_by_file": [1]}})


def small_files(folder, count, rows=3, name="f"):
    for number in range(count):
        write_lines(folder / f"{name}{number:03}.jsonl", [f"{name} {number} {row}" for row in range(rows)])
    return folder


def test_the_first_bad_row_of_a_bundle_is_named(tmp_path, model):
    write_lines(small_files(tmp_path / "in", 4) / "f002.jsonl", ["good", b" ", b"bad"])
    with pytest.raises(BadRowError, match=r"in/f002.jsonl:3: malformed_json"):
        prepare(blend_of(tmp_path / "in"), tmp_path / "out", tokenizer={"model": model}, on_bad_row="fail")
    planned = plan_here("pretrain", blend_of(tmp_path / "in"), tmp_path / "out", tokenizer={"model": model})
    (part,) = [shard.part for shard in planned.plan.shards]
    assert [place_of(part, row) for row in (0, 5, 6, 11)] == [
        f"{tmp_path}/in/{place}" for place in ("f000.jsonl:1", "f001.jsonl:3", "f002.jsonl:1", "f003.jsonl:3")
    ]


def test_packs_from_bundles_name_file_and_line(tmp_path):
    expected = set()
    for number in range(20):
        chats = [
            [{"role": "user", "content": f"q {number} {row}"}, {"role": "assistant", "content": "yes"}]
            for row in range(3)
        ]
        lines = [json.dumps({"messages": chat}).encode() for chat in chats]
        write_lines(tmp_path / "in" / f"{number:02}.jsonl", [lines[0], b"{}", *lines[1:]])
        expected |= {(f"{number:02}.jsonl", line, f"q {number} {row}") for row, line in enumerate((1, 3, 4))}
    tokenizer = {"model": str(chat_vocabulary(tmp_path / "vocabulary"))}
    planned, manifest = prepare_sft(blend_of(tmp_path / "in"), tmp_path / "out", tokenizer=tokenizer)
    assert len(planned.plan.shards) == 1
    (shard,) = manifest["shards"]
    assert shard["facts"]["rows_by_file"] == [4] * 20
    view = view_output(str(tmp_path / "out"), rows=100)
    sequences = [sequence for pack in view.packs for sequence in pack.sequences]
    assert len(sequences) == len(expected)
    texts = ["".join(passage.text for passage in each.passages) for each in sequences]
    found = zip(sequences, texts, strict=True)
    assert {(Path(each.file).name, each.line) for each, _ in found} == {(name, line) for name, line, _ in expected}
    for each, text in zip(sequences, texts, strict=True):
        (question,) = [q for name, line, q in expected if (name, line) == (Path(each.file).name, each.line)]
        assert question in text


@pytest.fixture
def before(tmp_path, model):
    """Files in a store that built each of them as a shard of its own, as if there were no bundles."""
    small_files(tmp_path / "in", 30)
    settings = {"tokenizer": {"model": model}, "store": str(tmp_path / "store")}

    def built(names):
        for name in names:
            prepare(blend_of(tmp_path / "in" / f"{name}.jsonl"), tmp_path / f"single-{name}", **settings)

    def plan(**more):
        return plan_here("pretrain", blend_of(tmp_path / "in"), tmp_path / "out", **settings, **more)

    return tmp_path / "in", built, plan


@pytest.mark.slow
def test_a_store_from_before_is_reused_whole(before):
    folder, built, plan = before
    built(f"f{number:03}" for number in range(30))
    assert plan().plan.pending == []
    assert len(plan().plan.shards) == 30
    write_lines(folder / "f010b.jsonl", ["new"])
    (shard,) = plan().plan.pending
    assert Path(shard.part.file.uri).name == "f010b.jsonl"
    assert len(plan(force=True).plan.shards) < 5


def test_separately_built_files_are_not_rebuilt(before):
    _, built, plan = before
    built(["f003", "f004", "f020"])
    planned = plan()
    pending = [
        [Path(part.file.uri).stem for part in shard.part.members or [shard.part]] for shard in planned.plan.pending
    ]
    expected = {f"f{number:03}" for number in range(30)} - {"f003", "f004", "f020"}
    assert sorted(name for names in pending for name in names) == sorted(expected)
    build_pending(planned)
    again = plan()
    assert again.plan.pending == []
    assert again.plan.keys == planned.plan.keys


def test_verified_bundle_is_kept_with_verified_files(before):
    _, built, plan = before
    planned = plan()
    build_pending(planned)
    built(["f003"])
    assert plan().plan.keys == planned.plan.keys
    assert plan().plan.pending == []


def test_a_night_names_the_files_that_changed_inside_a_bundle(tmp_path, model):
    folder = small_files(tmp_path / "in", 30)
    settings = {"tokenizer": {"model": model}}
    planned, manifest = prepare(blend_of(folder), tmp_path / "out", **settings)
    assert plan_changes(manifest, planned) == []
    (folder / "f011.jsonl").unlink()
    size = (folder / "f012.jsonl").stat().st_size
    write_lines(folder / "f012.jsonl", ["f 12 changed"])
    write_lines(folder / "f013b.jsonl", ["new"])
    found = plan_changes(manifest, plan_here("pretrain", blend_of(folder), tmp_path / "out", **settings))
    sizes = f"{size} bytes -> {(folder / 'f012.jsonl').stat().st_size} bytes"
    assert found == [f"in: 1 file new (f013b.jsonl), 1 shrunk (f012.jsonl: {sizes}), 1 gone (f011.jsonl)"]
