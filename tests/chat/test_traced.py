"""A traced text is the text that str makes of it, and every character of it still knows where it stood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat.traced import Traced, joined, mark

TEXTS = st.text("ab \n\t\u3000é<|", max_size=14)
PIECES = st.text("ab \n<|", min_size=1, max_size=2)
COUNTS = st.integers(-2, 4)
PLACES = st.none() | st.integers(-16, 16)


def traced(text):
    """`text`, in which the character at place i is the content of message i."""
    return Traced(text, tuple((place, place + 1, (place, "content")) for place in range(len(text))))


def places(found):
    """Where each character stood, None where that is not known; checks that spans fit the text and are in order."""
    known = [None] * len(found)
    for first, last, (place, kind) in found.spans if isinstance(found, Traced) else ():
        assert 0 <= first <= last <= len(found)
        assert kind == "content"
        assert last - first <= 1
        if first < last:
            assert known[first] is None, "one character has two origins"
            known[first] = place
    return known


def run(start, size):
    return list(range(start, start + size))


CUTS = {
    "strip": lambda text, _, __: text.strip(),
    "lstrip": lambda text, _, __: text.lstrip(),
    "rstrip": lambda text, _, __: text.rstrip(),
    "strip characters": lambda text, piece, _: text.strip(piece),
    "prefix": lambda text, piece, _: text.removeprefix(piece),
    "suffix": lambda text, piece, _: text.removesuffix(piece),
    "begin": lambda text, _, count: text[count:],
    "end": lambda text, _, count: text[:count],
    "split": lambda text, piece, count: text.split(piece, count),
    "rsplit": lambda text, piece, count: text.rsplit(piece, count),
    "partition": lambda text, piece, _: text.partition(piece),
    "rpartition": lambda text, piece, _: text.rpartition(piece),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@given(text=TEXTS, piece=PIECES, count=COUNTS, ends=st.booleans())
def test_parts_keep_their_places(cut, text, piece, count, ends):
    text = f"{piece}{text}{piece}" if ends else text
    found, behind = cut(traced(text), piece, count), 0
    assert found == cut(text, piece, count)
    assert type(found) is not str
    for part in [found] if isinstance(found, str) else found:
        known = places(part)
        assert not part or known == run(known[0], len(part)), "a part is consecutive"
        assert part == "".join(text[place] for place in known)
        assert not part or known[0] >= behind
        assert not part or len(part.spans) == len(part), "it knows only its own text"
        behind = known[-1] + 1 if part else behind


@given(TEXTS, PLACES, PLACES, st.integers(-3, 3).filter(bool))
def test_slices_with_steps_and_characters_are_plain(text, start, stop, step):
    found = traced(text)[start:stop:step]
    assert found == text[start:stop:step]
    assert step == 1 or places(found) == [None] * len(found)
    assert [type(traced(text)[place]) for place in range(len(text))] == [str] * len(text)


@given(TEXTS, PIECES | st.just(""), TEXTS, COUNTS)
def test_replace(text, old, new, count):
    found = traced(text).replace(old, new, count)
    assert found == text.replace(old, new, count)
    if not old:
        assert places(found) == [None] * len(found)
        return
    expected, start = [], 0
    for number, part in enumerate(text.split(old, count)):
        expected += [None] * len(new) * bool(number) + run(start, len(part))
        start += len(part) + len(old)
    assert places(found) == expected


@given(TEXTS, PIECES, TEXTS)
def test_inserted_text_keeps_only_its_own_origin(text, old, new):
    # `new` may be traced itself: its spans say nothing about `text`, and are never shifted onto it.
    found = traced(text).replace(old, traced(new))
    known = [place for place in places(found) if place is not None]
    assert found == text.replace(old, new)
    assert all(found[at] == text[place] for at, place in enumerate(places(found)) if place is not None)
    assert known == sorted(known)


@given(st.lists(TEXTS, max_size=5), TEXTS)
def test_joined(texts, between):
    """Plain and traced parts in turn."""
    parts = [traced(text) if number % 2 else text for number, text in enumerate(texts)]
    found = joined(iter(parts), between)
    assert found == between.join(texts)
    expected = []
    for number, text in enumerate(texts):
        expected += [None] * len(between) * bool(number) + (run(0, len(text)) if number % 2 else [None] * len(text))
    assert places(found) == expected


def test_joined_plain_texts_are_plain():
    assert type(joined(["a", "b"], "-")) is str
    assert type(joined([])) is str
    assert type(joined(["a", mark((1, "end"))])) is Traced


@given(TEXTS)
def test_it_is_a_str_like_any_other(text):
    found = traced(text)
    assert found == text
    assert hash(found) == hash(text)
    assert list(found) == list(text)
    assert f"{found}|{found!r}|{found:>20}" == f"{text}|{text!r}|{text:>20}"
    assert str(found) is found, "Jinja writes everything through str()"
    assert {found: 1}[text] == 1


ARGUMENTS = {
    "center": (20,), "ljust": (20, "."), "rjust": (20,), "zfill": (20,), "expandtabs": (3,), "encode": ("utf-8",),
    "count": ("a",), "find": ("a",), "rfind": ("a",), "startswith": ("a",), "endswith": ("a",), "join": (["a", "b"],),
    "index": ("",), "rindex": ("",), "translate": ({ord("a"): "bc"},), "partition": ("a",), "rpartition": ("a",),
    "removeprefix": ("a",), "removesuffix": ("a",), "replace": ("a", "bc"), "maketrans": ({"a": "b"},),
    "format_map": ({},),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in dir(str) if not name.startswith("_")])
@given(text=TEXTS)
def test_methods_match_str(name, text):
    arguments = ARGUMENTS.get(name, ())
    found, expected = getattr(traced(text), name)(*arguments), getattr(text, name)(*arguments)
    assert found == expected
    for each in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(each, Traced):
            assert all(place is None or each[at] == text[place] for at, place in enumerate(places(each)))


WHOLE = Traced(" \n text \n", ((0, 9, (4, "content")),))


@pytest.mark.parametrize(
    ("found", "text", "spans"),
    [
        (WHOLE.strip(), "text", [(0, 4)]),
        (WHOLE.split("x")[1], "t \n", [(0, 3)]),
        (WHOLE.replace("te", "T"), " \n Txt \n", [(0, 3), (4, 8)]),
        (WHOLE.rpartition("t")[2], " \n", [(0, 2)]),
        (WHOLE[3:5], "te", [(0, 2)]),
    ],
)
def test_a_part_of_a_span_is_a_span(found, text, spans):
    assert found == text
    assert [(first, last, (4, "content")) for first, last in spans] == list(found.spans)


@pytest.mark.parametrize(
    "gone",
    [
        lambda text: text.strip(), lambda text: text.lstrip(), lambda text: text.rstrip(), lambda text: text[2:2],
        lambda text: text[:0], lambda text: text.split(" \t")[0], lambda text: text.split(" \t")[1],
        lambda text: text.partition(" \t")[0], lambda text: text.removeprefix(" \t"), lambda text: text.removesuffix(" \t"),
    ],
)  # fmt: skip
def test_removed_spans_keep_their_position(gone):
    blank = gone(Traced(" \t", ((0, 2, (7, "content")),)))
    assert blank == ""
    assert blank.spans == ((0, 0, (7, "content")),)
    behind = joined(["<a>", blank, "</a>"])
    assert behind.spans == ((3, 3, (7, "content")),)


def test_marks_keep_their_position():
    text = joined(["one", mark((1, "message")), " two ", mark((1, "end")), "\n"])
    assert text.spans == ((3, 3, (1, "message")), (8, 8, (1, "end")))
    assert text.strip().spans == ((3, 3, (1, "message")),), "what stood in the blanks goes with them"
    assert text[2:8].spans == ((1, 1, (1, "message")), (6, 6, (1, "end")))
    assert text.replace("w", "ww").spans == ((3, 3, (1, "message")), (9, 9, (1, "end")))
