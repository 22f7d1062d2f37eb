"""Units, held against Unicode's own properties and a segmentation character by character."""

import random
import unicodedata
from itertools import pairwise

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.documents import content
from tokenmill.tasks.dedup.shingles import CHARACTER, KINDS, LETTER, WORD, normalized, units_of

from tests.dedup.deduplication import large
from tests.dedup.scripts import UNBROKEN, unbroken, units

PARTS = st.one_of(
    st.sampled_from(
        [" ", "word", "a,b", "the", "-", "\x00", "e\u0301", "Ж" * 39, "हिन्दी", "한국어", "é" * 40, "é" * 41]
    ),
    st.text("漢字かなカナ" + "ไทยພາສາခြင်းខ្មែរབོདꦗꦮᬩᬮ", max_size=8),
    st.text("abc(){}=.,;0123456789", max_size=90),
)


def cut(texts):
    """The units of texts as strings with their kinds."""
    found = units_of(texts)
    characters, bounds = content(texts)
    for number, (first, last) in enumerate(pairwise(found.bounds.tolist())):
        edges = [*found.starts[first:last].tolist(), bounds[number + 1]]
        strings = [characters[start:stop].tobytes().decode().rstrip(" ") for start, stop in pairwise(edges)]
        yield list(zip(strings, (KINDS[kind] for kind in found.kinds[first:last]), strict=True))


@given(texts=st.lists(st.lists(PARTS, max_size=12).map("".join), max_size=5))
@example(texts=["", "中 文and ไทย", "", "中" * 50, "x" * 41 + "中" + "y" * 40, ""])
def test_texts_are_cut_as_a_segmentation_by_characters_cuts_them(texts):
    found = normalized(large(texts))
    assert [*cut(found)] == [units(text) for text in found.to_pylist()]
    counts = units_of(found).by_kind.tolist()
    assert counts == [[sum(kind == each for _, kind in units(text)) for each in KINDS] for text in found.to_pylist()]


@given(texts=st.lists(st.lists(PARTS, max_size=12).map("".join), max_size=5), start=st.integers(0, 4))
def test_two_units_have_one_hash_where_they_are_the_same_string(texts, start):
    whole = normalized(large([*texts, "a", "a\x00", "ab", "\x00", "12345678", "123456789", "12345678\x00"]))
    some = whole.slice(start)
    strings = [string for text in cut(some) for string, _ in text]
    pairs = {*zip(strings, units_of(some).hashes.tolist(), strict=True)}
    assert len(pairs) == len({string for string, _ in pairs}) == len({value for _, value in pairs})


SCRIPTS = (
    "Thai", "Lao", "Khmer", "Myanmar", "Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet", "Ahom", "Balinese", "Javanese",
    "Batak", "Brahmi", "Cham", "Dives_Akuru", "Grantha", "Gurung_Khema", "Kawi", "Makasar", "Tulu_Tigalari", "Tibetan",
)  # fmt: skip
LETTERS = regex.compile("[" + "".join(rf"\p{{{name}}}" for name in SCRIPTS) + "]")
OF_NO_SCRIPT = regex.compile(r"[\p{Common}\p{Inherited}]")
BREAKING = regex.compile(r"[\p{Line_Break=SA}\p{Line_Break=AK}\p{Line_Break=AS}]")


def expected_kind(character):
    if LETTERS.match(character):
        return LETTER
    wide = unicodedata.east_asian_width(character) in "WFH"
    return CHARACTER if wide and "HANGUL" not in unicodedata.name(character, "") else WORD


def test_scripts_without_blanks_are_those_whose_lines_break_without_one():
    """Letters are of the scripts with letters of three classes of UAX #14, and Tibetan; characters are wide (UAX #11)."""
    points = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    known = [each for each in points if unicodedata.category(each)[0] in "LMN"]
    assert [each for each in known if BREAKING.match(each) and not LETTERS.match(each)] == []
    assert all(BREAKING.search("".join(regex.findall(rf"\p{{{name}}}", "".join(points)))) for name in SCRIPTS[:-1])
    known = [each for each in known if expected_kind(each) != WORD or not OF_NO_SCRIPT.match(each)]
    found = units_of(large([f"{each}." for each in known]))
    kinds = zip(known, found.kinds[found.bounds[:-1]].tolist(), strict=True)
    assert [hex(ord(each)) for each, kind in kinds if kind != expected_kind(each)] == []


@pytest.mark.parametrize("what", UNBROKEN)
def test_pieces_are_short_and_an_edit_moves_no_more_than_the_cuts_beside_it(what):
    generator = random.Random(what)
    for _ in range(50):
        text = unbroken(generator, what, 600)
        one, other = ([unit for unit, _ in each] for each in cut(large([text, f"{text[:300]}Q{text[300:]}"])))
        assert 2 < len(text) / len(one) < 8
        same = next(place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        after = next(
            place for place, pair in enumerate(zip(one[::-1], other[::-1], strict=False)) if pair[0] != pair[1]
        )
        assert len(one) - same - after <= 6


def test_blanks_and_line_breaks_beside_characters_mean_nothing():
    text = "春眠不覚暁"
    one, other = cut(normalized(large([text, "\n 春 眠\n不覚\u3000暁 "])))
    assert one == other
