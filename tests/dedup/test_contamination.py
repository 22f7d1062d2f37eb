"""Contamination, held against every run of 13 words compared as strings."""

import random
import unicodedata

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.contamination import HITS, WORDS, Evaluations, hits

from tests.dedup.deduplication import documents, large
from tests.dedup.scripts import BLANK, LANGUAGES, runs, size, units, written
from tests.dedup.test_near import prose
from tests.examples import max_examples

QUESTION = "If the mill grinds 12 sacks of wheat in 3 hours, how many sacks does it grind in 7 hours?"


def evaluations(**texts):
    return Evaluations.of({name: large(rows) for name, rows in texts.items()})


def bare_words(text):
    return " ".join(regex.findall(r"[\p{L}\p{M}\p{N}]+", unicodedata.normalize("NFC", text).lower()))


def looked_for(text):
    """The runs of a row, as long as 13 words, two characters or pieces or four letters counting for one; of a shorter row
    all of it, unless it is shorter than three.
    """
    sizes = {"characters": 2, "letters": 4, "pieces": 2}
    return runs(bare_words(text), WORDS, sizes) if size(bare_words(text), sizes) >= 3 else []


def by_comparison(texts, **files):
    """`(document, evaluation, row)` with the number of runs and the first."""
    first = {}
    for name, rows in files.items():
        for row, text in enumerate(rows):
            for run in looked_for(text):
                first.setdefault(run, (name, row))
    found, lengths = {}, sorted({len(run) for run in first})
    for number, text in enumerate(texts):
        strings = [unit for unit, _ in units(bare_words(text))]
        for start in range(len(strings)):
            for length in lengths:
                run = tuple(strings[start : start + length])
                if len(run) == length and run in first:
                    place = (number, *first[run])
                    found[place] = (found.get(place, (0, ""))[0] + 1, found.get(place, (0, " ".join(run)))[1])
    return found


def found(table):
    assert table.schema == HITS
    rows = table.to_pylist()
    return {(row["number"], row["evaluation"], row["row"]): (row["runs"], row["words"]) for row in rows}


def test_question_is_found_in_any_spelling():
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


def test_runs_match_a_full_comparison():
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


@max_examples(60)
@given(
    texts=st.lists(st.lists(st.sampled_from("ab"), max_size=30).map(" ".join), max_size=5),
    rows=st.lists(st.lists(st.sampled_from("ab"), max_size=18).map(" ".join), max_size=5),
)
def test_repetitions_are_counted_as_a_comparison_counts_them(texts, rows):
    assert found(hits(documents(texts), evaluations(exam=rows))) == by_comparison(texts, exam=rows)


@pytest.mark.parametrize("words", [2, 3, 12, 13])
def test_short_rows_are_looked_for_whole_and_those_that_are_too_short_are_counted(words):
    text = " ".join(str(number) for number in range(words))
    held = evaluations(exam=[text, "", "too short"], empty=[])
    assert list(held.short) == [3 <= words < WORDS, 0]
    assert list(held.too_short) == [2 + (words < 3), 0]
    assert hits(documents([text]), held).num_rows == (words >= 3)


def rewrapped(generator, language, text):
    """The text in lines of about as many characters: broken at blanks, or anywhere in a script without any."""
    if language in BLANK:
        return generator.choice(["\n", " \r\n  "]).join(text.split(" "))
    return "".join(each + ("" if each.isascii() else generator.choice(["", "", "", "\n", "\n\u3000"])) for each in text)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("words", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_question_is_found_in_every_script_with_any_line_breaks(language, words):
    generator = random.Random(language)
    exam = [written(generator, language, generator.randint(words, words + 10)) for _ in range(30)]
    long = [row for row in exam if looked_for(row)]
    around = [written(generator, language, 40) for _ in exam]
    texts = [f"{text}\n{rewrapped(generator, language, row)}\n{text}" for row, text in zip(exam, around, strict=True)]
    found = hits(documents([*texts, *around]), evaluations(exam=exam))
    expected = {(number, number) for number, row in enumerate(exam) if row in long}
    assert {(row["number"], row["row"]) for row in found.to_pylist()} >= expected
    assert {*found["number"].to_pylist()} <= {number for number, _, _ in by_comparison([*texts, *around], exam=exam)}
    assert len(expected) > 20


@pytest.mark.parametrize(
    ("row", "held", "free"),
    [
        ("Who wrote Hamlet?", "Q: who wrote\nHAMLET? Shakespeare.", "the man who wrote hamlets"),
        ("中国的首都是哪里。", "问:中国的首\n都是哪里? 北京。", "中国的首都是哪"),
        ("日本の首都はどこですか", "「日本の首都はどこですか」と聞いた。", "日本の首都はどこでした"),
        ("ประเทศไทยมีกี่จังหวัด", "ถามว่าประเทศไทย\nมีกี่จังหวัด ตอบ", "ประเทศไทยมีกี่จังหวั"),
        ("대한민국의 수도는 어디인가", "문: 대한민국의 수도는 어디인가?", "대한민국의 수도는 어디인가요"),
    ],
)
def test_a_short_question_is_found_whole(row, held, free):
    found = hits(documents([held, free]), evaluations(exam=["other row", row])).to_pylist()
    assert [(each["number"], each["row"], each["runs"]) for each in found] == [(0, 1, 1)]
    assert bare_words(found[0]["words"]) == bare_words(found[0]["words"].strip())
    assert found[0]["words"].replace(" ", "") == bare_words(row).replace(" ", "")


@pytest.mark.parametrize(("language", "least"), [("English", 13), ("Chinese", 26), ("Thai", 52)])
def test_a_part_of_a_question_is_found_from_thirteen_words_on(language, least):
    generator = random.Random(0)
    row = written(generator, language, 60)
    strings = [unit for unit, _ in units(bare_words(row))]
    join = " ".join if language == "English" else "".join
    found = hits(documents([join(strings[7:][: least - 1]), join(strings[7:][:least])]), evaluations(exam=[row]))
    assert [(each["number"], each["runs"]) for each in found.to_pylist()] == [(1, 1)]


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
