"""Two outputs side by side: planted changes are told exactly, and every document is accounted for."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.nightly.diff import CLASSES, diff, difference_record, publish_difference

from tests import preparing_dedup, preparing_harmony, preparing_rl, preparing_sft
from tests.examples import max_examples
from tests.flows.preparation_runs import called
from tests.preparing import prepare, write_lines
from tests.preparing_rl import write_rows
from tests.publishing_scores import embeddings_table, nll_table, publish_scores

ROWS = 60
TEXTS = [f"document number {number} has some words" for number in range(ROWS)]
SHARES = {"valid": 0.2, "test": 0.1}


@pytest.fixture
def night(tmp_path):
    """Publishes a version of a blend of `web` and `code`; each call may change something."""

    def publish(version, texts=TEXTS, *, names=("web", "code"), weights=(3.0, 1.0), prepare=prepare, **chosen):
        web = write_lines(tmp_path / version / "web.jsonl", texts)
        code = write_lines(tmp_path / "code.jsonl", [f"def function_{number}(): pass" for number in range(20)])
        sources = zip(names, (web, code), weights, strict=True)
        blend = {"datasets": [{"name": name, "path": str(path), "weight": weight} for name, path, weight in sources]}
        out = tmp_path / f"out-{version}"
        prepare(blend, out, **{"holdout": SHARES, "max_bad_row_fraction": 1.0, **chosen})
        return str(out)

    return publish


def told(found):
    """Documents by dataset, class and reason, without those that are kept."""
    return {(each.dataset, each.what, each.reason): each.documents for each in found.findings if each.what != "kept"}


def summed(found):
    counts = {what: found.count(what) for what in CLASSES}
    shared = counts["kept"] + counts["changed"] + counts["moved"]
    assert found.documents == (shared + counts["gone"], shared + counts["new"])
    return counts


REMOVED, ADDED = "the row was removed from the source", "the row was added to the source"
REWRITTEN = "the row changed in the source"

NOTHING_HELD_OUT = {"holdout": {"valid": 0, "test": 0}}
DAMAGED = [*TEXTS[:7], b"not JSON", *TEXTS[8:]]
CHANGED = [*TEXTS[:7], "document number seven, in other words", *TEXTS[8:]]

# Of two versions, the choices; documents by dataset, class and reason; a place in the examples; a line of the changes
PLANTED = {
    "nothing": ({}, {}, {}, None, None),
    "a row added": ({}, {"texts": [*TEXTS[:7], "something new", *TEXTS[7:]]}, {("web", "new", ADDED): 1}, "b/web.jsonl:8", None),
    "a row removed": ({}, {"texts": [*TEXTS[:7], *TEXTS[8:]]}, {("web", "gone", REMOVED): 1}, "a/web.jsonl:8", None),
    "a row quarantined": ({}, {"texts": DAMAGED}, {("web", "gone", "quarantined: malformed_json"): 1}, "a/web.jsonl:8", None),
    "a row repaired": ({"texts": DAMAGED}, {}, {("web", "new", "no longer dropped: quarantined: malformed_json"): 1}, "b/web.jsonl:8", None),
    # Its split depends on its hash: held out in none, it stays
    "a row changed": (NOTHING_HELD_OUT, {"texts": CHANGED, **NOTHING_HELD_OUT}, {("web", "changed", REWRITTEN): 1}, "b/web.jsonl:8", None),
    "a copy removed": (
        {"texts": [*TEXTS, TEXTS[3]]}, {},
        {("web", "gone", "a duplicate row was removed from the source; a copy is kept"): 1}, "a/web.jsonl:61", None,
    ),
    "a filter": (
        {}, {"min_doc_chars": 33}, {("web", "gone", "too_short"): 10, ("code", "gone", "too_short"): 20},
        "a/web.jsonl:1", "settings: min_doc_chars None -> 33",
    ),
    "a weight": ({}, {"weights": (1.0, 1.0)}, {}, None, "web: weight 3.0 -> 1.0"),
    "a source renamed": ({}, {"names": ("www", "code")}, {}, None, "web: renamed to www"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_changes_are_found_exactly(night, planted):
    before, after, expected, example, change = PLANTED[planted]
    found = diff(night("a", **before), night("b", **after))
    assert told(found) == expected
    summed(found)
    places = [place for each in found.findings for place in each.examples]
    assert any(place.endswith(example) for place in places) if example else not places
    # Each version has files of its own
    lines = [line for line in found.changes if "web.jsonl" not in line and "path" not in line]
    assert lines == ([change] if change else [])


def test_new_seed_only_moves_documents(night):
    found = diff(night("a"), night("b", holdout={**SHARES, "seed": 7}))
    counts = summed(found)
    assert counts["moved"] > 5
    assert counts["changed"] == counts["gone"] == counts["new"] == 0
    assert {reason for _, _, reason in told(found)} == {"holdout_seed 42 -> 7"}
    assert "settings: holdout.seed 42 -> 7" in found.changes


@pytest.mark.slow
def test_new_tokenizer_changes_every_document(night):
    found = diff(night("a"), night("b", tokenizer={"model": "cl100k_base"}))
    counts = summed(found)
    assert counts == {"kept": 0, "changed": ROWS + 20, "moved": 0, "gone": 0, "new": 0}
    assert all("tokenizer" in reason for _, _, reason in told(found))
    assert "settings: tokenizer.model 'o200k_harmony' -> 'cl100k_base'" in found.changes


def test_added_and_removed_datasets(night, tmp_path):
    both, one = night("a"), tmp_path / "one"
    blend = {"datasets": [{"name": "web", "path": str(tmp_path / "a/web.jsonl")}]}
    prepare(blend, one, holdout=SHARES)
    assert told(diff(both, str(one))) == {("code", "gone", "the dataset is gone"): 20}
    assert told(diff(str(one), both)) == {("code", "new", "the dataset is new"): 20}


def test_a_row_that_deduplication_decides_against_is_gone_with_its_verdict(tmp_path):
    """Its own row, not the one that is kept, with the outcome that the decision names."""
    words = random.Random(1).choices([f"word{number}" for number in range(500)], k=300)
    almost = [*words[:150], "another", *words[151:]]
    path = write_lines(tmp_path / "web.jsonl", [*TEXTS[:5], " ".join(almost), *TEXTS[5:9], " ".join(words)])
    blend = {"datasets": [{"name": "web", "path": str(path)}]}
    copies = write_lines(tmp_path / "first.jsonl", [TEXTS[3], TEXTS[7]])
    both = {"datasets": [{"name": "first", "path": str(copies)}, *blend["datasets"]]}
    preparing_dedup.prepare(blend, tmp_path / "all", near=False)
    preparing_dedup.prepare(blend, tmp_path / "near", near=True)
    preparing_dedup.prepare(both, tmp_path / "exact", near=False)
    for after, expected, places in (
        ("near", {("web", "gone", "near_duplicate"): 1}, ["web.jsonl:11"]),
        (
            "exact",
            {("first", "new", "the dataset is new"): 2, ("web", "gone", "exact_duplicate"): 2},
            ["web.jsonl:4", "web.jsonl:9"],
        ),
    ):
        found = diff(str(tmp_path / "all"), str(tmp_path / after))
        assert told(found) == expected
        summed(found)
        (gone,) = [each for each in found.findings if each.what == "gone"]
        assert [place.rpartition("/")[2] for place in gone.examples] == places
        back = diff(str(tmp_path / after), str(tmp_path / "all"))
        assert back.count("new") == len(places)
        assert all(reason.startswith("no longer dropped: ") for _, what, reason in told(back) if what == "new")


@pytest.mark.slow
@max_examples(15)
@given(st.lists(st.integers(0, 9), max_size=25), st.lists(st.integers(0, 9), max_size=25))
def test_any_two_lists_of_rows_add_up(tmp_path_factory, before, after):
    """Rows with copies, in any order; kept are as many as the two multisets share, apart from changes of rows."""
    folder = tmp_path_factory.mktemp("rows")
    outs = []
    for name, numbers in (("a", before), ("b", after)):
        path = write_lines(folder / name / "web.jsonl", ["the anchor", *(f"text {number}" for number in numbers)])
        prepare(
            {"datasets": [{"name": "web", "path": str(path)}]}, folder / f"out-{name}", holdout={"valid": 0, "test": 0}
        )
        outs.append(str(folder / f"out-{name}"))
    found = diff(*outs)
    counts = summed(found)
    shared = sum(min(before.count(number), after.count(number)) for number in range(10))
    assert counts["kept"] == shared + 1
    assert found.documents == (len(before) + 1, len(after) + 1)


def test_the_page_and_the_json_have_the_same_counts(night, tmp_path):
    a, b = night("a"), night("b", [*TEXTS[1:], "<script>alert(1)</script>"])
    shown = called("diff", a, b, "--format", "json", "--html", tmp_path / "diff.html")
    assert shown.returncode == 0, shown.stderr
    record = json.loads(shown.stdout)["diff"]
    assert record == json.loads(json.dumps(difference_record(diff(a, b))["diff"]))
    assert record["classes"] == {"kept": ROWS + 19, "changed": 0, "moved": 0, "gone": 1, "new": 1}
    page = (tmp_path / "diff.html").read_text()
    assert "<script" not in page
    assert f"{ROWS + 20:,} -&gt; {ROWS + 20:,} documents" in page
    again = publish_difference(diff(a, b), str(tmp_path / "again.html"))
    assert Path(again.path).read_text() == page
    assert "1 gone" in called("diff", a, b).stdout
    assert "dataset web, documents 1, class new, reason " in called("diff", a, b, "--format", "text").stdout


def test_outputs_of_different_kinds_are_rejected(night, tmp_path):
    out = night("a")
    path = write_lines(tmp_path / "web.jsonl", TEXTS)
    preparing_dedup.prepare({"datasets": [{"name": "web", "path": str(path)}]}, tmp_path / "dedup")
    with pytest.raises(InputError, match="two outputs of one kind"):
        diff(out, str(tmp_path / "dedup"))
    with pytest.raises(InputError, match="no manifest"):
        diff(out, str(tmp_path / "nothing"))
    rows = [{"row_id": "1", "id": "1", "dataset": "a", "split": "b"}]
    for kind, made in (("nll", nll_table(rows, [1.0])), ("embeddings", embeddings_table(["1"], np.ones((1, 4), np.float32)))):  # fmt: skip
        scores = publish_scores(tmp_path / kind, kind, [("rows.parquet", made)])
        with pytest.raises(InputError, match=f"holds {kind!r}, which publishes no documents; give the folder of the rows"):  # fmt: skip
            diff(scores, scores)


def test_conversations_and_rows_for_rl_are_accounted_for_too(tmp_path):
    for prepare_kind, row in (
        (
            preparing_sft.prepare,
            lambda n: {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]},
        ),
        (preparing_rl.prepare, lambda n: {"question": f"How many are {n} and {n}?", "answer": str(2 * n)}),
    ):
        outs = []
        folder = tmp_path / prepare_kind.__module__
        for version, numbers in (("a", range(40)), ("b", [*range(7), 99, *range(8, 40)])):
            path = folder / version / "rows.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(row(number)) + "\n" for number in numbers))
            blend = {"datasets": [{"name": "rows", "path": str(path)}]}
            prepare_kind(blend, folder / version / "out", holdout={"valid": 0, "test": 0})
            outs.append(str(folder / version / "out"))
        found = diff(*outs)
        assert told(found) == {("rows", "changed", REWRITTEN): 1}
        assert summed(found)["kept"] == 39


def asked(number):
    return {
        "messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"It is {number}."}]
    }


@pytest.fixture
def normalized(tmp_path):
    """Publishes a normalization of conversations, asked about numbers; a string stands for a row that is no conversation."""

    def publish(version, numbers, *, name="chats", split=None, **chosen):
        rows = [{"messages": each} if isinstance(each, str) else asked(each) for each in numbers]
        path = write_rows(tmp_path / version / "chats.jsonl", rows)
        source = {"name": name, "path": str(path), **({"split": split} if split else {})}
        out = tmp_path / version / "out"
        preparing_harmony.prepare({"datasets": [source]}, out, **{"dedup": {"near": False}, **chosen})
        return str(out)

    return publish


NUMBERS = [*range(12)]

NORMALIZED = {
    "nothing": (NUMBERS, {}, {}),
    "a row added": ([*NUMBERS[:5], 99, *NUMBERS[5:]], {}, {("chats", "new", ADDED): 1}),
    "a row removed": ([*NUMBERS[:5], *NUMBERS[6:]], {}, {("chats", "gone", REMOVED): 1}),
    "a row changed": ([*NUMBERS[:5], 99, *NUMBERS[6:]], {}, {("chats", "changed", f"{REWRITTEN}, or the decision about its duplicates"): 1}),
    "a dataset renamed": (NUMBERS, {"name": "talks"}, {}),
    "a filter": (
        NUMBERS,
        {"min_completion_chars": 9},
        {("chats", "gone", "quarantined: empty_completion"): 10},
    ),
    "a copy": ([*NUMBERS, 3, 7], {"dedup": {"near": False, "mode": "drop"}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("planted", NORMALIZED)
def test_every_normalized_row_is_accounted_for(normalized, planted):
    numbers, chosen, expected = NORMALIZED[planted]
    found = diff(normalized("a", NUMBERS), normalized("b", numbers, **chosen))
    assert told(found) == expected
    summed(found)


def test_dropped_duplicate_names_the_kept_row(normalized):
    """With a bad row before it, so that rows and normalized rows have other numbers. The others are marked as kept."""
    numbers = [0, "no list", *range(1, 6), 3, 4]
    every = normalized("a", numbers, dedup={"mode": "off"})
    found = diff(every, normalized("b", numbers, dedup={"mode": "drop", "near": False}))
    assert told(found) == {("chats", "gone", "exact_duplicate"): 2, ("chats", "changed", "decided None -> 'drop'"): 6}
    summed(found)
    (gone,) = [each for each in found.findings if each.what == "gone"]
    assert [place.rpartition("/")[2] for place in gone.examples] == ["chats.jsonl:8", "chats.jsonl:9"]


def test_a_normalized_row_that_is_marked_is_changed_by_the_decision(normalized):
    dropped = {"mode": "tag", "near": False}
    found = diff(normalized("a", [*range(8), 90], dedup=dropped), normalized("b", [*range(8), 3], dedup=dropped))
    assert summed(found)["kept"] == 8
    assert {what for _, what, _ in told(found)} == {"changed"}
