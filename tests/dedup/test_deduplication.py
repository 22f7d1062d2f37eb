"""Documents of several slices decided in rounds, without Prefect or Dask, held against every pair compared in Python."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup.decisions import DROPPED, digest_of, dropped, rows_decided
from tokenmill.tasks.dedup.documents import EDGES
from tokenmill.tasks.dedup.rounds import (
    KIND,
    MAX_PARTITIONS,
    DocumentSlice,
    decide,
    partitions_for,
    planned_rounds,
)
from tokenmill.tasks.dedup.settings import DedupChoices
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.slices import ContentIndex, cut

from tests.dedup.test_near import corpus, edited, from_the_best_down, prose, truth
from tests.preparing import write_lines
from tests.preparing_dedup import Run, stored_conversations
from tests.preparing_rl import write_rows

ROUNDS = ("sign", "exact", "pairs", "verify", "narrow", "crowds", "settle", "decide")


def slices_of(folder, size=1 << 40, id_field=None, cap_by=None, **files):
    """Slices of JSON Lines files of these rows, in order, about `size` bytes each."""
    found = []
    for name, rows in files.items():
        write = write_rows if any(isinstance(row, dict) for row in rows) else write_lines
        write(folder / f"{name}.jsonl", rows)
        parts = cut(discover(DataSource(name=name, path=str(folder / f"{name}.jsonl")))[0], size, ["text"])
        options = {"text_field": "text", "id_field": id_field, "cap_by": cap_by}
        found += [
            DocumentSlice("text", part, options, f"{name}@{part.start}")
            for part in ContentIndex().identify(parts, ["text"], "content")
        ]
    return found


def decisions_about(slices, tmp_path, run=None, rebuild=False, **choices):
    return decide(slices, DedupChoices(**choices), str(tmp_path / "store"), run or Run(), rebuild=rebuild)


def outcomes(found, slices):
    """What became of the rows that do not stay, and for whom they went, by the name of each."""
    return {
        f"{each.name}#{row['row']}": (row["outcome"], row["duplicate_of"])
        for number, each in enumerate(slices)
        for row in rows_decided(found.uri, found.digests[number]).to_pylist()
    }


@pytest.fixture
def many_partitions(monkeypatch):
    """A partition for every 20 kilobytes."""
    monkeypatch.setattr("tokenmill.tasks.dedup.rounds.PARTITION_BYTES", 20_000)


def planted(seed):
    """Texts with near-duplicates and with copies that differ in white space; the kept text of each exact and near duplicate."""
    generator = random.Random(seed)
    texts = corpus(seed, originals=50)
    texts += [f"{text}\n" if generator.random() < 0.5 else text for text in generator.sample(texts, 30)]
    generator.shuffle(texts)
    best = {}
    for number in sorted(range(len(texts)), key=lambda number: (-len(texts[number]), number)):
        best.setdefault(texts[number].strip(), number)
    exact = {number: best[text.strip()] for number, text in enumerate(texts) if best[text.strip()] != number}
    remaining = [number for number in range(len(texts)) if number not in exact]
    alike = {
        (remaining[one], remaining[two]): share for (one, two), share in truth([texts[n] for n in remaining]).items()
    }
    ranks = [-1 if number in exact else len(text) for number, text in enumerate(texts)]
    near = {number: kept for number, (kept, _) in from_the_best_down(len(texts), ranks, alike).items()}
    return texts, exact, near


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1 << 40, 15_000])
def test_drops_match_a_comparison_of_all_pairs(tmp_path, many_partitions, seed, size):
    texts, exact, near = planted(seed)
    slices = slices_of(tmp_path, size, one=texts[:70], two=texts[70:120], three=texts[120:])
    names = [f"{each.name}#{row}" for each in slices for row in range(rows_of(each))]
    found = decisions_about(slices, tmp_path)
    assert len(names) == len(texts)
    assert len(exact) == 30
    assert len(near) > 30
    assert outcomes(found, slices) == {
        **{names[number]: ("exact_duplicate", names[kept]) for number, kept in exact.items()},
        **{names[number]: ("near_duplicate", names[kept]) for number, kept in near.items()},
    }
    assert found.tally == {"exact_duplicate": 30, "near_duplicate": len(near), "kept": len(texts) - 30 - len(near)}
    edges = pq.read_table(f"{found.folder}/{found.edges.path}").to_pylist()
    assert {row["dropped"]: (row["reason"], row["kept"]) for row in edges} == outcomes(found, slices)


def rows_of(each):
    content = open(each.part.file.uri, "rb").read()  # noqa: PTH123, SIM115
    first = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))][:-1]
    return sum(each.part.start <= place < each.part.stop for place in first)


@pytest.mark.parametrize(
    ("source_bytes", "partitions"),
    [(0, 1), (128_000_000, 1), (128_000_001, 2), (300_000_000, 4), (10**13, MAX_PARTITIONS)],
)
def test_partitions_are_128_megabytes_by_a_power_of_two(source_bytes, partitions):
    assert partitions_for(source_bytes) == partitions


@pytest.mark.parametrize(
    ("chosen", "documents"),
    [(["blank"], 0), (["bad", "blank"], 0), (["wordless"], 3), (["blank", "wordless", "bad", "good"], 7)],
)
def test_slices_without_documents(tmp_path, monkeypatch, chosen, documents):
    monkeypatch.setattr("tokenmill.tasks.dedup.rounds.PARTITION_BYTES", 20)
    files = {
        "blank": [b"", b" "],
        "bad": [b"{broken", b"[]", {"text": None}],
        "wordless": ["", " \n", "?"],
        "good": ["?", "one two", b"{broken", "", "one two"],
    }
    blend = {"datasets": [{"name": "exam", "path": str(write_lines(tmp_path / "exam.jsonl", ["too short"]))}]}
    slices = slices_of(tmp_path, cap_by="topic", **{name: files[name] for name in chosen})
    found = decisions_about(slices, tmp_path, cap=1, evaluations=blend)
    assert sum(found.tally.values()) == documents
    expected = {
        "wordless@0#0": ("exact_duplicate", "wordless@0#1"),  # the longest stays
        "good@0#3": ("exact_duplicate", "wordless@0#1"),
        "good@0#0": ("exact_duplicate", "wordless@0#2"),
        "good@0#4": ("exact_duplicate", "good@0#1"),
    }
    assert outcomes(found, slices) == {name: what for name, what in expected.items() if name.split("@")[0] in chosen}


@pytest.mark.parametrize(
    ("choices", "rounds"),
    [
        ({"threshold": 0.9}, ["verify", "narrow", "crowds", "settle", "decide"]),
        ({"near": False}, ["sign", "exact", "settle", "decide"]),
        ({"cap": 1}, ["sign", *ROUNDS[1:7], "cap", "decide"]),
        ({"mode": "drop"}, []),
    ],
)
def test_a_choice_costs_only_the_rounds_that_it_concerns(tmp_path, choices, rounds):
    slices = slices_of(tmp_path, cap_by="topic", a=["one", "two", "one"])
    decisions_about(slices, tmp_path)
    run = Run()
    decisions_about(slices, tmp_path, run, **choices)
    assert run.built == rounds


def test_names_do_not_affect_signatures(tmp_path):
    slices, run = slices_of(tmp_path, a=["one", "two", "one"]), Run()
    decisions_about(slices, tmp_path)
    renamed = [DocumentSlice(each.reader, each.part, each.options, "b") for each in slices]
    found = decisions_about(renamed, tmp_path, run)
    assert run.built == ["decide"]
    assert outcomes(found, renamed) == {"b#2": ("exact_duplicate", "b#0")}


def test_versions_below_the_threshold_are_kept(tmp_path):
    generator = random.Random(0)
    text = prose(generator, 100)
    slices = slices_of(tmp_path, a=[text, edited(generator, text, 1)])  # 91 of 101 runs
    assert decisions_about(slices, tmp_path, threshold=0.9).tally["near_duplicate"] == 1
    assert decisions_about(slices, tmp_path, threshold=0.91).tally == {"kept": 2}


def test_shortest_answers_are_kept_without_counting_duplicates(tmp_path):
    texts = ["a long answer", "short", "short", "an answer", "a longer answer", "none"]
    topics = ["sum", "sum", "sum", "sum", "product", None]
    rows = [{"text": text, "at": {"topic": topic}} for text, topic in zip(texts, topics, strict=True)]
    slices = slices_of(tmp_path, cap_by="at.topic", a=rows)
    found = decisions_about(slices, tmp_path, cap=2)
    assert outcomes(found, slices) == {"a@0#2": ("exact_duplicate", "a@0#1"), "a@0#0": ("beyond_cap", None)}
    assert found.facts["without_prompt"] == 1


QUESTION = "If the mill grinds twelve sacks of wheat in three hours, how many sacks does it grind in seven hours?"


def test_documents_that_hold_an_evaluation_go_and_every_hit_is_reported(tmp_path):
    (tmp_path / "exams").mkdir()
    other = prose(random.Random(0), 20)
    write_rows(tmp_path / "exams/arms.jsonl", [b"", b"", b"", {"q": other}])
    write_rows(tmp_path / "exams/deep.jsonl", [b"", {"q": "too short"}, {"q": QUESTION.upper()}])
    blend = {"datasets": [{"name": "exam", "path": str(tmp_path / "exams"), "text_field": "q"}]}
    texts = ["innocent", f"We ask: {QUESTION}", f"We ask:  {QUESTION}", f"{QUESTION} {other}"]
    slices = slices_of(tmp_path, a=texts[:2], b=texts[2:])
    found = decisions_about(slices, tmp_path, near=False, evaluations=blend)
    assert outcomes(found, slices) == {
        "a@0#1": ("exact_duplicate", "b@0#0"),
        "b@0#0": ("contaminated", None),
        "b@0#1": ("contaminated", None),
    }
    hits = pq.read_table(f"{found.folder}/{found.hits.path}").to_pylist()
    assert [(row["document"], row["evaluation"], row["row"], row["runs"]) for row in hits] == [
        ("a@0#1", "exam/deep.jsonl", 2, 8),
        ("b@0#0", "exam/deep.jsonl", 2, 8),
        ("b@0#1", "exam/arms.jsonl", 3, 8),
        ("b@0#1", "exam/deep.jsonl", 2, 8),
    ]
    assert found.facts["evaluations"] == [
        {"name": "exam/arms.jsonl", "rows": 1, "whole": 0, "too_short": 0},
        {"name": "exam/deep.jsonl", "rows": 2, "whole": 0, "too_short": 1},
    ]


def test_an_evaluation_that_changes_is_looked_for_again(tmp_path):
    slices, runs = slices_of(tmp_path, a=[QUESTION, "innocent"]), []
    for question in ("innocent", QUESTION, "innocent"):
        write_lines(tmp_path / "exam.jsonl", [question])
        runs.append(Run())
        blend = {"datasets": [{"name": "exam", "path": str(tmp_path / "exam.jsonl")}]}
        found = decisions_about(slices, tmp_path, runs[-1], evaluations=blend)
        assert (len(outcomes(found, slices)) > 0) == (question == QUESTION)
    assert [run.built.count("sign") for run in runs] == [1, 1, 0]


@pytest.mark.parametrize(
    ("place", "words"), [("{0}/exam.jsonl", r"exam\.jsonl:2: malformed_json"), ("/nowhere.jsonl", "nowhere"), (None, "nowhere")]
)  # fmt: skip
def test_evaluations_that_have_a_hole_or_are_not_there_are_an_error(tmp_path, place, words):
    write_lines(tmp_path / "exam.jsonl", [QUESTION, b"{broken"])
    blend = {"datasets": [{"name": "exam", "path": place.format(tmp_path)}]} if place else "/nowhere.json"
    with pytest.raises(InputError, match=words):
        decisions_about(slices_of(tmp_path, a=["one"]), tmp_path, evaluations=blend)


def test_decisions_are_found_by_hash_and_unchanged(tmp_path):
    slices = slices_of(tmp_path, a=["one", "one"], b=["two", "two", "one"], c=["three"], d=["four"])
    found = decisions_about(slices, tmp_path)
    assert found.digests[2] == found.digests[3]
    assert len({*found.digests}) == 3
    for number in range(4):
        assert digest_of(rows_decided(found.uri, found.digests[number])) == found.digests[number]
    with pytest.raises(RunError, match="doesn't contain decisions 0000"):
        rows_decided(found.uri, "0000")


def test_a_round_that_leaves_gaps_is_an_error(tmp_path):
    slices = slices_of(tmp_path, a=["one"], b=["two"])
    with pytest.raises(RunError, match=r"2 of 2 planned shards don't have a receipt: sign/a@0/"):
        decisions_about(slices, tmp_path, lambda *_, **__: ())


def test_compared_fields_are_part_of_the_identity(tmp_path):
    slices = slices_of(tmp_path, a=["one"])
    store = Store(str(tmp_path), KIND)
    signed = {
        shard.key
        for choices in ({}, {"near_on": "prompt"}, {"near": False}, {"cap": 2})
        for shard in planned_rounds(slices, DedupChoices(**choices), store)[0]
    }
    assert len(signed) == 4
    other = [DocumentSlice("harmony", slices[0].part), DocumentSlice("text", slices[0].part, {"text_field": "t"})]
    assert len({shard.key for shard in planned_rounds(other, DedupChoices(), store)[0]} - signed) == 2


def test_dropped_rows_do_not_count_for_the_cap(tmp_path):
    generator = random.Random(0)
    text = prose(generator, 100)
    rows = [
        {"text": f"{text} {QUESTION}", "topic": "asked"},
        {"text": f"{prose(generator, 200)}", "topic": "asked"},
        {"text": prose(generator, 100), "topic": "likes"},
    ]
    rows.append({"text": f"{rows[2]['text']} longer", "topic": "likes"})
    exam = {"datasets": [{"name": "exam", "path": str(write_lines(tmp_path / "exam.jsonl", [QUESTION]))}]}
    slices = slices_of(tmp_path, cap_by="topic", a=rows)
    assert outcomes(decisions_about(slices, tmp_path, cap=1, evaluations=exam), slices) == {
        "a@0#0": ("contaminated", None),
        "a@0#2": ("near_duplicate", "a@0#3"),
    }


def conversation(system, question, answer):
    return render([
        HarmonyMessage("system", system),
        HarmonyMessage("user", question),
        HarmonyMessage("assistant", answer, channel="final", terminator="return"),
    ])  # fmt: skip


def harmony_slice(folder, rows):
    """A slice of normalized rows: id, text, prompt, correctness."""
    columns = zip(*rows, strict=True)
    names = ("row_id", "text", "prompt_id", "meta_correctness_own")
    named = dict(zip(names, map(list, columns), strict=True))
    return DocumentSlice("harmony", stored_conversations(folder, named))


def test_conversations_are_compared_by_text_and_the_most_correct_kept(tmp_path):
    generator = random.Random(0)
    long, questions = prose(generator, 200), [prose(generator, 30) for _ in range(3)]
    answers = [prose(generator, 30) for _ in range(6)]
    rows = [
        ("a", conversation(long, questions[0], answers[0]), "p", 0.5),
        ("b", conversation("short", questions[0], answers[0]), "q", 0.75),
        ("c", conversation(long, questions[1], answers[1]), "r", None),
        ("d", conversation(long, questions[1], answers[1]), "r", 0.25),
        ("e", conversation(long, questions[2], answers[2]), "s", 0.5),
        ("f", conversation(long, questions[2], f"{answers[3]} {answers[4]}"), "s", 1.0),
        ("g", conversation(long, questions[2], answers[5]), "s", 1.0),
    ]
    slices = [harmony_slice(tmp_path, rows)]

    def found(**choices):
        decisions = decisions_about(slices, tmp_path, **choices)
        table = rows_decided(decisions.uri, decisions.digests[0])
        return {rows[row["row"]][0]: (row["outcome"], row["duplicate_of"]) for row in table.to_pylist()}

    alike = {"a": ("near_duplicate", "b"), "c": ("exact_duplicate", "d")}
    assert found() == alike
    assert found(cap=1) == alike | {"e": ("beyond_cap", None), "f": ("beyond_cap", None)}
    assert found(near_on="prompt") == alike | {"e": ("near_duplicate", "f"), "g": ("near_duplicate", "f")}


CALLED = {
    "by their own ids where they have any": (
        {
            "a": [
                {"text": "one", "id": "first"},
                {"text": "one", "id": 7},
                {"text": "one"},
                {"text": "two", "id": "other"},
            ],
            "b": [{"text": "two", "id": {"n": 1}}],
        },
        [("7", "first", "first"), ("a@0#2", "first", "first"), ('{"n":1}', "other", "other")],
    ),
    "a group by its first whoever stays": (
        {"a": [{"text": "one"}, {"text": "two"}], "b": [{"text": " one "}, {"text": "one"}]},
        [("a@0#0", "b@0#0", "a@0#0"), ("b@0#1", "b@0#0", "a@0#0")],
    ),
}


@pytest.mark.parametrize("how", CALLED)
def test_what_documents_and_groups_are_called(tmp_path, how):
    files, expected = CALLED[how]
    found = decisions_about(slices_of(tmp_path, id_field="id", **files), tmp_path)
    edges = pq.read_table(f"{found.folder}/{found.edges.path}").to_pylist()
    assert [(row["dropped"], row["kept"], row["group"]) for row in edges] == expected


def gone(*numbers):
    return pa.table({"dropped": pa.array(numbers, pa.int64())})


def test_without_drops_all_rows_are_kept():
    assert dropped({}).equals(DROPPED.empty_table())
    assert dropped({"dup_exact": EDGES.empty_table(), "cap": gone()}).equals(DROPPED.empty_table())


@pytest.mark.parametrize("drops", [{"cap": gone(9, 4, 4)}, {"dup_exact": gone(4), "cap": gone(4, 9)}])
def test_a_document_dropped_twice_is_an_error(drops):
    with pytest.raises(RunError, match=r"^document 4 is dropped twice, the second time as cap \(1 such documents\)"):
        dropped(drops)
