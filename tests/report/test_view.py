"""The view: stored rows come back as what was put in, and nothing in them reaches the terminal or the page raw."""

import io
import itertools
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import visible
from tokenmill.tasks.report.dataframe import dataframe
from tokenmill.tasks.report.rendered_view import print_view, publish_html, view_html
from tokenmill.tasks.report.view import view_output, view_record
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings

from tests.examples import max_examples
from tests.preparing import blend_of, prepare, write_lines
from tests.report.html_page import Page
from tests.tokenize.small_vocabularies import EOS, byte_level_bpe, ids_of, reference

ROLES = ["template", "system", "developer", "user", "assistant", "tool", "padding"]
PACK_SIZE = 64
KEYS = ["1a2b3c4d" + "0" * 24, "1a2b3c4d" + "1" * 24, "feedbeef" + "0" * 24]
MESSAGES = [("user", "Two plus two?", False), ("template", "<|turn|>", False), ("assistant", "Four.\n", True)]

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J[red]not red[/red]<script>alert(1)</script>\u202egnp.exe\u2069\x9b31m\x7f\r\b\0"
    '⟦fake⟧"><img src=x onerror=alert(1)>&lt;\u200b\u2028\ufeff\U000e0041 :warning: 日本語 e\u0301'
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def encode(vocabulary):
    """Text to ids by the reference; control strings are control ids."""
    tokenizer = reference(vocabulary, literal=False)
    return lambda text: ids_of(tokenizer, [text])[0]


@pytest.fixture(scope="module")
def decode(vocabulary):
    tokenizer = reference(vocabulary)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def columns_of(sequences):
    """The row of a packed Parquet file for `[(document, [(role, ids, trained), …]), …]`."""
    row = {name: [] for name in ("input_ids", "loss_mask", "seq_start_id", "document", "role_start", "role")}
    for document, runs in sequences:
        row["seq_start_id"].append(len(row["input_ids"]))
        row["document"].append(document)
        targets = [trained for _, ids, trained in runs for _ in ids]
        for role, ids, _ in runs:
            row["role_start"].append(len(row["input_ids"]))
            row["role"].append(ROLES.index(role))
            row["input_ids"] += ids
        row["loss_mask"] += [*map(int, targets[1:]), 0]
    return row


SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("seq_start_id", pa.list_(pa.int32())),
        ("document", pa.list_(pa.int64())),
        ("role_start", pa.list_(pa.int32())),
        ("role", pa.list_(pa.int8())),
    ],
    metadata={b"tokenmill": json.dumps({"format": "packed-sft", "version": 1, "pack_size": PACK_SIZE}).encode()},
)


def write_packs(out, key, part, packs, group=2):
    place = Path(out, "shards", "packs", key, f"{part}.parquet")
    place.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([columns_of(pack) for pack in packs], SCHEMA)
    pq.write_table(table, place, row_group_size=group, compression="zstd")
    return place


def write_manifest(out, entries, vocabulary, **changes):
    tokenizer = {"model": str(vocabulary), "add_eos": False}
    groups = [  # of packs, here one for each part of a shard, with the shard's key
        {
            **entry, "documents": {part: 1}, "facts": {part: facts}, "published": {},
            "source": {"sequences": [f"{entry['key']}/{part}"]},
        }
        for entry in entries for part, facts in entry["facts"].items() if facts["packs"]
    ]  # fmt: skip
    manifest = {
        "type": "sft",
        "settings": {"tokenizer": tokenizer},
        "tokenizer": {"fingerprint": load_vocabulary(parse(TokenizerSettings, tokenizer, "test")).fingerprint},
        "recipes": [{"kind": "sft", "recipe": {}}],
        "shards": entries,
        "derived": {"recipes": [{"kind": "packs", "recipe": {}}], "shards": groups},
        "volatile": {"store": str(Path(out, "shards"))},
        **changes,
    }
    Path(out, "manifest.json").write_bytes(sealed(manifest))


def entry_of(key, parts, dataset="chat", file="/data/chat.jsonl", start=0, stop=1000, rows=10):
    """The manifest's entry of a shard with so many packs in each part."""
    return {
        "key": key, "dataset": dataset, "split": "datasets", "file": file, "start": start, "stop": stop, "rows": rows,
        "documents": dict.fromkeys(parts, rows), "facts": {name: {"packs": packs} for name, packs in parts.items()},
        "source": {"content": key}, "recipe": 0,
    }  # fmt: skip


def runs_of(messages, encode):
    return [(role, encode(text), trained) for role, text, trained in messages]


@pytest.fixture
def chat(tmp_path, vocabulary, encode):
    """Makes an output folder of one shard from packs of `(document, [(role, text, trained), …])`."""

    def make(*packs, **entry):
        encoded = [[(document, runs_of(messages, encode)) for document, messages in pack] for pack in packs]
        write_packs(tmp_path, KEYS[0], "all", encoded)
        write_manifest(tmp_path, [entry_of(KEYS[0], {"all": len(packs)}, **entry)], vocabulary)
        return str(tmp_path)

    return make


@pytest.fixture(scope="module")
def many(tmp_path_factory, vocabulary, encode):
    """Three shards of two datasets with eleven packs, each of one document that says which pack it is."""
    out = tmp_path_factory.mktemp("many")
    names = {KEYS[0]: {"train": 4, "valid": 1}, KEYS[1]: {"train": 3, "valid": 0}, KEYS[2]: {"train": 3}}
    for key, parts in names.items():
        for part, count in parts.items():
            texts = [f"{key[:9]} {part} {number}" for number in range(count)]
            write_packs(out, key, part, [[(row, [("user", encode(text), False)])] for row, text in enumerate(texts)])
    entries = [
        entry_of(KEYS[0], names[KEYS[0]], stop=500, rows=7),
        entry_of(KEYS[1], names[KEYS[1]], start=500, rows=5),
        entry_of(KEYS[2], names[KEYS[2]], dataset="tools", file="/data/tools.jsonl"),
        entry_of(KEYS[2], names[KEYS[2]], dataset="tools-again", file="/data/again.jsonl"),
    ]
    write_manifest(out, entries, vocabulary)
    return str(out)


ALL_TEXTS = [
    *[f"1a2b3c4d0 train {number}" for number in range(4)], "1a2b3c4d0 valid 0",
    *[f"1a2b3c4d1 train {number}" for number in range(3)], *[f"feedbeef0 train {number}" for number in range(3)],
]  # fmt: skip


def sequences(view):
    return [sequence for pack in view.packs for sequence in pack.sequences]


def texts(view):
    return ["".join(passage.text for passage in sequence.passages) for sequence in sequences(view)]


run = st.tuples(st.sampled_from(ROLES), st.lists(st.integers(0, 699), min_size=1, max_size=4), st.booleans())
pack = st.lists(st.tuples(st.integers(0, 99), st.lists(run, min_size=1, max_size=5)), min_size=1, max_size=4)


@pytest.mark.slow
@given(packs=st.lists(pack, min_size=1, max_size=5))
@settings(max_examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_passages_are_the_runs_of_equal_role_and_training(tmp_path, vocabulary, decode, packs):
    write_packs(tmp_path, KEYS[0], "all", packs)
    write_manifest(tmp_path, [entry_of(KEYS[0], {"all": len(packs)})], vocabulary)
    view = view_output(str(tmp_path), rows=len(packs))
    assert [pack.row for pack in view.packs] == list(range(len(packs)))
    for stored, shown in zip(packs, view.packs, strict=True):
        assert [f"1a2b3c4d-{document}" for document, _ in stored] == [s.document for s in shown.sequences]
        sizes = [(role, len(ids)) for _, runs in stored for role, ids, _ in runs]
        assert shown.tokens == sum(size for _, size in sizes) == shown.fill * PACK_SIZE
        assert shown.padding == sum(size for role, size in sizes if role == "padding")
        for (_, runs), sequence in zip(stored, shown.sequences, strict=True):
            found = [(p.role, p.trained, p.tokens, p.text) for p in sequence.passages]
            assert found == expected_passages(runs, decode)


def expected_passages(runs, decode):
    tokens = [[role, trained, token] for role, ids, trained in runs for token in ids]
    tokens[0][1] = False  # nothing comes before it, so it is no target
    grouped = [
        (role, trained, [token for *_, token in group])
        for (role, trained), group in itertools.groupby(tokens, lambda token: tuple(token[:2]))
    ]
    return [(role, trained, len(ids), "" if role == "padding" else decode(ids)) for role, trained, ids in grouped]


def test_no_mask_makes_the_first_token_of_a_sequence_a_target(tmp_path, vocabulary):
    row = columns_of([(3, [("user", [65, 66], False)]), (4, [("user", [67, 68], True)])])
    row["loss_mask"][1] = 1
    pq.write_table(pa.Table.from_pylist([row], SCHEMA), write_packs(tmp_path, KEYS[0], "all", []))
    write_manifest(tmp_path, [entry_of(KEYS[0], {"all": 1})], vocabulary)
    found = [[(p.tokens, p.trained) for p in s.passages] for s in sequences(view_output(str(tmp_path)))]
    assert found == [[(2, False)], [(1, False), (1, True)]]


def test_first_rows_in_order(many):
    assert texts(view_output(many)) == ALL_TEXTS[:1]
    assert texts(view_output(many, rows=6)) == ALL_TEXTS[:6]
    assert texts(view_output(many, rows=99)) == ALL_TEXTS
    frame = dataframe(many, "documents")
    assert frame["text"].tolist() == ALL_TEXTS
    shown = sequences(view_output(many, rows=99))
    assert frame[["id", "file"]].to_numpy().tolist() == [[each.document, each.file] for each in shown]
    assert [mask.sum() for mask in frame["trained"]] == [each.trained for each in shown]
    packs = dataframe(many, "packs")
    assert [ids for pack in packs["ids"] for ids in pack] == frame["id"].tolist()


def test_a_seed_chooses_rows_over_all_shards(many):
    assert sorted(texts(view_output(many, seed=5, rows=99))) == sorted(ALL_TEXTS)
    chosen = [texts(view_output(many, seed=seed, rows=2)) for seed in range(40)]
    assert all(first != second for first, second in chosen)
    assert {text for pair in chosen for text in pair} == set(ALL_TEXTS)
    assert chosen == [texts(view_output(many, seed=seed, rows=2)) for seed in range(40)]


def test_one_dataset_can_be_asked_for(many):
    assert texts(view_output(many, dataset="tools", rows=99)) == ALL_TEXTS[8:]
    (sequence,) = sequences(view_output(many, dataset="tools-again"))
    assert sequence.file == "/data/again.jsonl"
    with pytest.raises(InputError, match="'tool' in this preparation; did you mean 'tools'"):
        view_output(many, dataset="tool")


def test_document_is_shown_from_every_pack(chat):
    turns = [[("user", f"turn {number}", False)] for number in range(6)]
    out = chat(
        [(3, turns[0]), (17, turns[1])], [(4, turns[2])], [(17, turns[3]), (5, turns[4]), (17, turns[5])], rows=18
    )
    view = view_output(out, doc="1a2b3c4d-17")
    assert texts(view) == ["turn 1", "turn 3", "turn 5"]
    found = [(pack.row, pack.count, [s.number for s in pack.sequences]) for pack in view.packs]
    assert found == [(0, 2, [1]), (2, 3, [0, 2])]


def test_documents_are_found_beyond_the_first_thousand_packs(tmp_path, vocabulary):
    packs = [[(number, [("user", [65], False)])] for number in range(2100)]
    write_packs(tmp_path, KEYS[0], "all", packs, group=500)
    write_manifest(tmp_path, [entry_of(KEYS[0], {"all": 2100}, rows=2100)], vocabulary)
    assert [pack.row for pack in view_output(str(tmp_path), doc="1a2b3c4d-2077").packs] == [2077]


def test_an_id_that_two_shards_share_asks_for_more_of_the_key(many):
    with pytest.raises(InputError, match=f"2 shards match.*{KEYS[0]}, {KEYS[1]}"):
        view_output(many, doc="1a2b3c4d-2")
    assert texts(view_output(many, doc="1a2b3c4d1-2")) == ["1a2b3c4d1 train 2"]
    assert texts(view_output(many, doc=f"{KEYS[0]}-0")) == ["1a2b3c4d0 train 0", "1a2b3c4d0 valid 0"]


@pytest.mark.parametrize(
    ("doc", "complaint"),
    [
        ("17", "not a document id"),
        ("1A2B3C4D-17", "not a document id"),
        ("1a2b3c4d-", "not a document id"),
        ("00000000-1", "no shard here matches"),
        ("feedbeef-train-1", "no shard here matches"),
        ("feedbeef-99", "doesn.t have document 99"),
    ],
)
def test_an_id_of_nothing_is_an_error(many, doc, complaint):
    with pytest.raises(InputError, match=complaint):
        view_output(many, doc=doc)


def test_lines_count_the_rows_of_the_slices_before(many, chat):
    assert [sequence.line for sequence in sequences(view_output(many, rows=6))] == [1, 2, 3, 4, 1, 8]
    after_a_gap = chat([(3, MESSAGES)], start=1000, stop=2000)
    (sequence,) = sequences(view_output(after_a_gap))
    assert (sequence.line, sequence.start, sequence.stop) == (None, 1000, 2000)


def test_a_changed_tokenizer_is_an_error(tmp_path, encode):
    folder = byte_level_bpe(tmp_path / "vocabulary", size=700)
    write_packs(tmp_path, KEYS[0], "all", [[(0, runs_of(MESSAGES, encode))]])
    write_manifest(tmp_path, [entry_of(KEYS[0], {"all": 1})], folder)
    view_output(str(tmp_path))
    byte_level_bpe(tmp_path / "vocabulary", size=690)
    with pytest.raises(InputError, match="here, but the shards were made with sha256:"):
        view_output(str(tmp_path))


def test_unviewable_output_is_explained(tmp_path, chat, vocabulary):
    with pytest.raises(InputError, match=r"no manifest\.json here"):
        view_output(str(tmp_path / "nowhere"))
    out = chat([(3, MESSAGES)])
    with pytest.raises(InputError, match="--limit: 0"):
        view_output(out, rows=0)
    write_manifest(out, [entry_of(KEYS[0], {"all": 1})], vocabulary, type="rl")
    with pytest.raises(InputError, match="type 'rl'; view shows pretrain and sft"):
        view_output(out)
    write_manifest(out, [], vocabulary)
    with pytest.raises(InputError, match="the shards are empty"):
        view_output(out)


ROW = columns_of([(3, [("user", [65, 66], False), ("assistant", [67, 68], True)]), (4, [("user", [69], False)])])
DAMAGES = {
    "pack 2 is missing, it holds 1": lambda row: row,
    "5 values of input_ids but 4 of loss_mask": lambda row: row["loss_mask"].pop(),
    "2 values of seq_start_id but 1 of document": lambda row: row["document"].pop(),
    "seq_start_id does not increase from 0 to below 5": lambda row: row["seq_start_id"].__setitem__(1, 5),
    "role_start does not increase from 0 to below 5": lambda row: row["role_start"].__setitem__(0, 1),
    "row 1: seq_start_id does not": lambda row: [row[name].clear() for name in ("seq_start_id", "document")],
    "a role is not one of 0 to 6": lambda row: row["role"].__setitem__(0, 7),
}


@pytest.mark.parametrize("complaint", DAMAGES)
def test_a_damaged_row_is_named(tmp_path, vocabulary, complaint):
    row = {name: list(values) for name, values in ROW.items()}
    DAMAGES[complaint](row)
    place = write_packs(tmp_path, KEYS[0], "all", [])
    pq.write_table(pa.Table.from_pylist([row], SCHEMA), place)
    write_manifest(tmp_path, [entry_of(KEYS[0], {"all": 2})], vocabulary)
    with pytest.raises(RunError, match=f"{re.escape(str(place))}: .*{complaint}.*tokenmill verify"):
        view_output(str(tmp_path), rows=2)


@pytest.mark.parametrize("damage", ["missing", "cut", "no metadata", "no column"])
def test_a_damaged_file_is_named(chat, damage):
    out = chat([(3, MESSAGES)])
    place = Path(out, "shards/packs", KEYS[0], "all.parquet")
    table, content = pq.read_table(place), place.read_bytes()
    place.unlink()
    if damage == "cut":
        place.write_bytes(content[:-30])
    elif damage == "no metadata":
        pq.write_table(table.replace_schema_metadata(), place)
    elif damage == "no column":
        pq.write_table(table.drop_columns("role"), place)
    with pytest.raises(RunError, match=re.escape(str(place))):
        view_output(out)
    if damage != "no metadata":
        with pytest.raises(RunError, match=re.escape(str(place))):
            view_output(out, doc="1a2b3c4d-3")


SOURCE_TEXTS = [f"document {number}:\n{HOSTILE} {number * 7919 % 1000}" for number in range(60)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, vocabulary):
    """A bin/idx preparation of two datasets and three shards with held-out documents, whose sources are gone."""
    folder = tmp_path_factory.mktemp("pretrained")
    paths = [write_lines(folder / "a.jsonl", SOURCE_TEXTS[:40]), write_lines(folder / "b.jsonl", SOURCE_TEXTS[40:])]
    chosen = {"tokenizer": {"model": str(vocabulary)}, "shard_size": 7000, "holdout": {"valid": 0.3, "test": 0}}
    _, manifest = prepare(blend_of(*paths), folder / "out", **chosen)
    assert len(manifest["shards"]) == 3
    for path in paths:
        path.unlink()
    return str(folder / "out")


def test_each_id_of_a_bin_names_its_document(pretrained):
    everything = view_output(pretrained, rows=99)
    assert {(p.role, p.trained) for s in sequences(everything) for p in s.passages} == {("text", True)}
    assert {(pack.fill, pack.padding, pack.count) for pack in everything.packs} == {(None, 0, 1)}
    of_b = texts(view_output(pretrained, dataset="b", rows=99))
    assert sorted(of_b) == sorted(text + EOS for text in SOURCE_TEXTS[40:])
    ids = [sequence.document for sequence in sequences(everything)]
    assert {name.split("-")[1] for name in ids} == {"train", "valid"}
    for document, text in list(zip(ids, texts(everything), strict=True))[::7]:
        assert texts(view_output(pretrained, doc=document)) == [text]
    key = ids[0].partition("-")[0]
    with pytest.raises(InputError, match=r"doesn.t have document 999"):
        view_output(pretrained, doc=f"{key}-train-999")
    with pytest.raises(InputError, match="1a2b3c4d-train-17"):
        view_output(pretrained, doc=f"{key}-0")


@pytest.mark.parametrize(("shortest", "reason"), [(None, "empty_document"), (2, "too_short")])
def test_bin_documents_name_their_source_line(shortest, reason, tmp_path, vocabulary):
    """Whatever was dropped before it in its slice, and wherever its file is cut."""
    kept = [f"document {number}:\n{HOSTILE}" for number in range(200)]
    dropped = [b"{broken", b"", "", f"a {EOS} b"]
    rows = [row for number, text in enumerate(kept) for row in [*dropped[: number % 6], text][-(number % 3) - 1 :]]
    source = write_lines(tmp_path / "a.jsonl", rows)
    chosen = {"tokenizer": {"model": str(vocabulary)}, "shard_size": 5000, "max_bad_row_fraction": 0.9}
    chosen |= {"min_doc_chars": shortest, "special_tokens_in_text": "reject", "holdout": {"valid": 0.3, "test": 0.2}}
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    assert len(manifest["shards"]) > 3
    assert {*manifest["totals"]["dropped"]} == {"malformed_json", "blank_line", "special_token_in_text", reason}
    shown = sequences(view_output(str(tmp_path / "out"), rows=999))
    assert sorted(sequence.passages[0].text for sequence in shown) == sorted(t + EOS for t in kept)
    lines = source.read_bytes().splitlines()
    for sequence in shown:
        assert json.loads(lines[sequence.line - 1])["text"] + EOS == sequence.passages[0].text


def test_documents_without_a_map_name_their_slice(tmp_path, vocabulary):
    """As of shards that were built before there were maps."""
    source = write_lines(tmp_path / "a.jsonl", SOURCE_TEXTS)
    prepare(blend_of(source), tmp_path / "out", tokenizer={"model": str(vocabulary)})
    (place,) = (tmp_path / "out/shards/pretrain").rglob("receipt.json")
    receipt = Receipt.load(place.read_bytes())
    outputs = [output for output in receipt.outputs if output.path != "rows.map"]
    place.write_bytes(replace(receipt, outputs=outputs).dump())
    assert {sequence.line for sequence in sequences(view_output(str(tmp_path / "out"), rows=99))} == {None}


def test_a_damaged_bin_is_named(pretrained):
    place = view_output(pretrained).packs[0].file
    key = read_manifest(pretrained)["shards"][0]["key"]
    index = Path(pretrained, "shards/pretrain", key, "train.idx")
    content = index.read_bytes()
    try:
        index.write_bytes(content[:40] + b"\x01" + content[41:])
        with pytest.raises(RunError, match=f"{re.escape(str(place))}: (length of sequence|place)"):
            view_output(pretrained)
    finally:
        index.write_bytes(content)


def test_bin_with_missing_documents_is_named(pretrained, tmp_path):
    manifest = read_manifest(pretrained)
    last = manifest["shards"][-1]
    last["documents"]["train"] += 1
    (tmp_path / "manifest.json").write_bytes(sealed(manifest))
    documents = last["documents"]["train"] - 1
    with pytest.raises(RunError, match=f"document {documents + 1} is missing, it holds {documents}; run"):
        view_output(str(tmp_path), doc=f"{last['key']}-train-{documents}")


UNSAFE = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}


def unsafe_in(text):
    return sorted({hex(ord(character)) for character in text if unicodedata.category(character) in UNSAFE} - {"0xa"})


@given(st.text(st.characters(categories=None)))
def test_visible_text_lacks_active_characters(text):
    shown = visible(text)
    assert unsafe_in(shown) == []
    assert shown.count("\n") == shown.count("↵\n") == text.count("\n")


@given(st.text(st.characters(exclude_categories=UNSAFE)))
def test_visible_text_keeps_printable_characters(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a↵\nb"),
        ("\x1b[2J", "␛[2J"),
        ("\t\r\0\x7f", "␉␍␀␡"),
        ("\x9b", "\\x9b"),
        ("\u202e\u2028\ufeff", "\\u202e\\u2028\\ufeff"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
    ],
)
def test_codes_without_a_shape_are_spelled_out(text, shown):
    assert visible(text) == shown


@pytest.fixture
def hostile(chat):
    """Hostile text in every place there is: trained, not trained, the dataset's name, the file's."""
    messages = [("user", HOSTILE, False), ("assistant", f"{HOSTILE}\n[bold]", True)]
    out = chat([(3, messages)], dataset=HOSTILE, file=f"/data/{HOSTILE}\nx.jsonl")
    return view_output(out)


def drawn(view, **options):
    file = io.StringIO()
    print_view(view, Console(file=file, **{"width": 100, "no_color": True, **options}))
    return file.getvalue()


@pytest.mark.parametrize("width", [24, 60, 400])
def test_hostile_text_is_inert_in_a_terminal(hostile, width):
    output = drawn(hostile, width=width)
    assert unsafe_in(output) == []
    assert max(cell_len(line) for line in output.splitlines()) <= width
    flowing = re.sub(r"\s", "", output)
    for literal in (
        "[red]notred[/red]",
        "<script>alert(1)</script>",
        "[bold]",
        ":warning:",
        "␛]0;owned␇␛[2J",
        "日本語",
    ):
        assert flowing.count(literal) == (1 if literal == "[bold]" else 4)


def test_colors_are_set_by_the_view_only(hostile):
    coloured = drawn(hostile, no_color=False, force_terminal=True, color_system="standard", width=400)
    plain = drawn(hostile, width=400)
    assert "\x1b[32m⟦" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_trained_text_is_marked_without_colors_and_unforgeable(chat):
    fake = [("user", "⟦I am trained on⟧", False), ("assistant", "so am I", True), ("user", "not I", False)]
    output = drawn(view_output(chat([(3, fake)])))
    legend, *lines = output.splitlines()
    assert "⟦trained on⟧" in legend
    assert [line for line in lines if "⟦" in line or "⟧" in line] == [line for line in lines if "so am I" in line]
    assert re.search(r"assistant\s+⟦so am I⟧", output)
    assert re.search(r"user\s+not I\s*$", output, re.MULTILINE)


def test_rules_roles_sources_and_padding_are_shown(chat):
    output = drawn(view_output(chat([(3, MESSAGES), (8, [("padding", EOS * 4, False)])])))
    rules = [line for line in output.splitlines() if "──" in line]
    assert ["1a2b3c4d-3 (1 of 2)" in rules[0], "1a2b3c4d-8 (2 of 2)" in rules[1], len(rules)] == [True, True, 2]
    assert "/data/chat.jsonl:4: " in output
    assert "/data/chat.jsonl:9: 4 tokens, 0 trained on" in output
    assert re.search(r"padding\s+4 tokens", output)
    assert "row 1 of " in output
    assert EOS not in output
    assert re.search(r"assistant\s+⟦Four\.↵⟧", output)


def test_hostile_text_is_inert_in_a_page_that_is_self_contained(hostile):
    page = view_html(replace(hostile, path=f"/{HOSTILE}", tokenizer=HOSTILE))
    assert unsafe_in(page) == []
    parsed = Page(page)
    assert " ".join(sorted(parsed.tags)) == "body dd dl dt h1 h2 h3 head html main meta p section style title"
    attributes = {name for _, attrs in parsed.elements for name in attrs}
    assert attributes == {"lang", "charset", "http-equiv", "content", "name", "class"}
    shown = [("", visible(HOSTILE)), ("trained", visible(f"{HOSTILE}\n[bold]"))]
    assert parsed.passages[-2:] == shown
    assert parsed.text.count("<script>alert(1)</script>") == 8
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1] == "default-src 'none'; style-src 'unsafe-inline'"
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]


def test_page_counts_padding_and_is_published_whole(chat, tmp_path):
    view = view_output(chat([(3, [*MESSAGES, ("padding", EOS * 4, False)])]))
    output = publish_html(view, str(tmp_path / "deep" / "view.html"))
    page = Path(output.path).read_bytes()
    assert len(page) == output.size
    assert page.decode() == view_html(view)
    kinds = [("", "Two plus two?"), ("", "<|turn|>"), ("trained", "Four.↵\n"), ("padding", "4 tokens")]
    assert Page(page.decode()).passages[-4:] == kinds


def test_the_record_is_plain_data_with_the_text_as_it_is(hostile, chat):
    record = json.loads(json.dumps(view_record(hostile)))["view"]
    passages = record["packs"][0]["sequences"][0]["passages"]
    assert [passage["text"] for passage in passages] == [HOSTILE, f"{HOSTILE}\n[bold]"]
    assert record["type"] == "sft"
    record = view_record(view_output(chat([(3, [("user", "a", False)])])))["view"]
    (shown,) = record["packs"]
    assert (shown["tokens"], shown["pack_size"], shown["fill"]) == (1, PACK_SIZE, 1 / PACK_SIZE)
    assert Path(record["path"], "manifest.json").is_file()
