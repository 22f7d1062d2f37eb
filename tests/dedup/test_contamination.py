"""Contamination, held against every run of 13 words compared as strings."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.dedup.contamination import HITS, WORDS, Evaluations, hits
from tests.dedup.deduplication import documents, large
from tests.dedup.test_near import prose
from tests.dedup.test_shingles import shingled

QUESTION = "If the mill grinds 12 sacks of wheat in 3 hours, how many sacks does it grind in 7 hours?"


def evaluations(**texts):
    return Evaluations.of({name: large(rows) for name, rows in texts.items()})


def bare_words(text):
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def by_comparison(texts, **files):
    """`(document, evaluation, row)` with the number of runs and the first."""
    first = {}
    for name, rows in files.items():
        for row, text in enumerate(rows):
            if len(bare_words(text).split()) >= WORDS:
                for run in shingled(bare_words(text), WORDS):
                    first.setdefault(run, (name, row))
    found = {}
    for number, text in enumerate(texts):
        for run in shingled(bare_words(text), WORDS):
            if run in first:
                place = (number, *first[run])
                found[place] = (found.get(place, (0, run))[0] + 1, found.get(place, (0, run))[1])
    return found


def found(table):
    assert table.schema == HITS
    rows = table.to_pylist()
    return {(row["number"], row["evaluation"], row["row"]): (row["runs"], row["words"]) for row in rows}


def test_a_question_is_found_however_it_is_written():
    copies = [
        QUESTION,
        QUESTION.upper(),
        QUESTION.replace(" ", "\n ").replace(",", " --"),
        f"<b>{QUESTION}</b> Eighteen.",
    ]
    innocent = ["A mill is a machine.", " ".join(QUESTION.split()[:12]), " ".join(reversed(QUESTION.split())), ""]
    held = evaluations(gsm=["Another question.", QUESTION])
    assert found(hits(documents([*innocent, *copies]), held)) == {
        (number, "gsm", 1): (8, "if the mill grinds 12 sacks of wheat in 3 hours how many") for number in range(4, 8)
    }


def test_runs_are_those_of_a_comparison():
    generator = random.Random(5)
    rows = [prose(generator, generator.randint(5, 60)) for _ in range(300)]
    files = {"one": rows[:150], "two": [*rows[150:], rows[3]]}
    texts = []
    for _ in range(200):
        row = generator.choice(rows).split()
        piece = row[generator.randrange(len(row)) :][: generator.randint(1, 40)]
        texts.append(" ".join([prose(generator, 30), *piece, prose(generator, 30)]))
    expected = by_comparison(texts, **files)
    assert len(expected) > 50
    assert found(hits(documents(texts), evaluations(**files))) == expected


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from("ab"), max_size=30).map(" ".join), max_size=5),
    rows=st.lists(st.lists(st.sampled_from("ab"), max_size=18).map(" ".join), max_size=5),
)
def test_repetitions_are_counted_as_a_comparison_counts_them(texts, rows):
    assert found(hits(documents(texts), evaluations(exam=rows))) == by_comparison(texts, exam=rows)


@pytest.mark.parametrize("size", [12, 13])
def test_rows_that_are_too_short_are_counted(size):
    text = " ".join(str(number) for number in range(size))
    held = evaluations(exam=[text, "", "too short"], empty=[])
    assert list(held.short) == [2 + (size < WORDS), 0]
    assert hits(documents([text]), held).num_rows == (size >= WORDS)


def test_hits_do_not_depend_on_slices():
    generator = random.Random(2)
    exam = [prose(generator, 40) for _ in range(5)]
    texts = [
        f"{prose(generator, 5)} {exam[number % 7]}" if number % 7 < 5 else prose(generator, 50) for number in range(60)
    ]
    held = evaluations(exam=exam)
    whole = hits(documents(texts), held)
    pieces = [hits(documents(texts[at : at + 9], numbers=range(at, min(at + 9, 60))), held) for at in range(0, 60, 9)]
    assert [row for piece in pieces for row in piece.to_pylist()] == whole.to_pylist()
    assert whole.num_rows > 40
