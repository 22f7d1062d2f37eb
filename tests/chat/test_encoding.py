"""Pieces and their tokens: nothing is moved, nothing is trained on beyond a border, and a batch is the sum of its parts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from tokenmill.tasks.chat.controls import Controls
from tokenmill.tasks.chat.encoding import Batch, Passage, Segment, connected, cut
from tokenmill.tasks.chat.encoding import runs as runs_of
from tokenmill.tasks.tokenize.encoders import ReferenceEncoder

from tests.tokenize.small_vocabularies import byte_level_bpe, reference

SYSTEM, USER, ASSISTANT = 1, 3, 4
CONTROLS = Controls({"<s>": 90, "</s>": 91})


def text(words, role=USER, trained=False, breaks=False):
    return Segment(words, -1, role, trained, breaks)


def token(number, role=USER, trained=False):
    return Segment(None, number, role, trained)


def mixed(words, lengths, breaks=False):
    """A text in segments, untrained and trained in turn; empty ones are left out."""
    parts = [(part, number % 2 == 1) for number, part in enumerate(_parts(words, lengths)) if part]
    return [text(part, trained=here, breaks=breaks and not number) for number, (part, here) in enumerate(parts)]


class Listening:
    """An encoder that remembers what it was asked to encode."""

    def __init__(self, tokenizer):
        self.asked = []
        self._encoder = ReferenceEncoder(
            lambda texts: [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
        )

    def encode(self, texts):
        self.asked.append(texts.to_pylist())
        return self._encoder.encode(texts)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return reference(byte_level_bpe(tmp_path_factory.mktemp("vocabulary")))


def merging(*merges, alphabet="abc ", normalizer=None):
    """A BPE that joins only these pairs, in this order; a text is one word."""
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    model = models.BPE(vocab={each: number for number, each in enumerate(tokens)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    return tokenizer


def encoded(tokenizer, *sequences):
    batch = Batch()
    for pieces in sequences:
        batch.add(pieces)
    return batch.encode(Listening(tokenizer))


def lists(found, number):
    """Ids and loss of one sequence."""
    where = slice(found.offsets[number], found.offsets[number + 1])
    return found.ids[where].tolist(), found.trained[where].tolist()


# Borders inside of tokens.

AB = merging(("a", "b"), ("ab", "c"))  # a 0, b 1, c 2, blank 3, ab 4, abc 5
BORDERS = [
    # the text, lengths of its parts (not trained, trained, …), ids of the whole, what is trained, tokens in doubt
    ("ab", (1, 1), [4], [0], 1),
    ("ab", (0, 1, 1), [4], [0], 1),
    ("a b", (1, 2), [0, 3, 1], [0, 1, 1], 0),
    ("ab ab", (2, 3), [4, 3, 4], [0, 1, 1], 0),
    ("ab ab", (3, 2), [4, 3, 4], [0, 0, 1], 0),
    ("ab ab", (4, 1), [4, 3, 4], [0, 0, 0], 1),
    ("ab ab", (1, 4), [4, 3, 4], [0, 1, 1], 1),
    ("ab ab", (0, 4, 1), [4, 3, 4], [1, 1, 0], 1),
    ("ab ab", (0, 1, 4), [4, 3, 4], [0, 0, 0], 1),
    ("abc", (2, 1), [5], [0], 1),
    ("abc", (1, 1, 1), [5], [0], 1),
    ("c abc c", (3, 1, 3), [2, 3, 5, 3, 2], [0, 0, 0, 0, 0], 1),
    ("c abc c", (0, 3, 1, 3), [2, 3, 5, 3, 2], [1, 1, 0, 1, 1], 1),
    ("c abc c", (0, 7), [2, 3, 5, 3, 2], [1, 1, 1, 1, 1], 0),
    ("c abc c", (2, 3, 2), [2, 3, 5, 3, 2], [0, 0, 1, 0, 0], 0),
]


@pytest.mark.parametrize(("words", "lengths", "ids", "loss", "doubtful"), BORDERS)
def test_a_token_that_a_border_falls_into_is_counted_and_not_trained_on(words, lengths, ids, loss, doubtful):
    found = encoded(AB, mixed(words, lengths))
    assert lists(found, 0) == (ids, loss)
    assert found.straddled.tolist() == [doubtful]


def test_between_two_borders_in_doubt_nothing_is_trained_on():
    # Between them the tokens are those of the part, but where they stand in the whole is known from neither end.
    found = encoded(AB, mixed("ab c ab", (1, 5, 1)))
    assert lists(found, 0) == ([4, 3, 2, 3, 4], [0, 0, 0, 0, 0])
    assert found.straddled.tolist() == [5]


def test_doubt_is_counted_for_its_own_sequence():
    clean = [text("a"), token(9)]
    doubtful = [token(9), text("c"), *mixed("ab", (1, 1), breaks=True), text("c", breaks=True)]
    found = encoded(AB, clean, doubtful, clean, [*doubtful, *doubtful], mixed("a b", (1, 2)))
    assert found.straddled.tolist() == [0, 1, 0, 2, 0]
    assert lists(found, 4) == ([0, 3, 1], [0, 1, 1])


ALTERNATING = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(st.text("abc ", min_size=1, max_size=12), ALTERNATING)
def test_trained_tokens_are_within_learned_text(words, lengths):
    lengths = _fitted(lengths, len(words))
    (ids, loss), found = _mixed(AB, words, lengths)
    encoding = AB.encode(words)
    learned = _flags(lengths)
    parts = [AB.encode(part).ids for part in _parts(words, lengths)]
    assert ids == encoding.ids
    for here, (start, stop) in zip(loss, encoding.offsets, strict=True):
        assert not here or all(learned[start:stop]), "trained beyond a border"
    exactly = [int(all(learned[start:stop])) for start, stop in encoding.offsets]
    if list(itertools.chain(*parts)) == ids:
        assert loss == exactly
        assert found.straddled.tolist() == [0]
    else:
        lost = sum(exactly) - sum(loss)
        cut_through = sum(any(learned[start:stop]) != all(learned[start:stop]) for start, stop in encoding.offsets)
        assert max(1, lost, cut_through) <= found.straddled[0] <= len(ids)


@pytest.mark.slow
@given(words=st.text(max_size=20), lengths=ALTERNATING)
def test_any_text_in_parts_is_written_out_whole(small, words, lengths):
    lengths = _fitted(lengths, len(words))
    (ids, loss), found = _mixed(small, words, lengths)
    assert ids == small.encode(words, add_special_tokens=False).ids
    if not found.straddled[0]:
        trained = [one for one, here in zip(ids, loss, strict=True) if here]
        assert small.decode(trained) == "".join(_parts(words, lengths)[1::2])


def _mixed(tokenizer, words, lengths):
    found = encoded(tokenizer, mixed(words, lengths))
    return lists(found, 0), found


def _fitted(lengths, size):
    """The lengths, cut and drawn out to `size`."""
    ends = [min(end, size) for end in itertools.accumulate(lengths)]
    ends[-1] = size
    return tuple(np.diff([0, *ends]).tolist())


def _flags(lengths):
    return [number % 2 == 1 for number, length in enumerate(lengths) for _ in range(length)]


def _parts(words, lengths):
    ends = list(itertools.accumulate(lengths, initial=0))
    return [words[start:stop] for start, stop in itertools.pairwise(ends)]


# Batches.

WORDS = st.sampled_from(["", "a", "\n", "Hello, world!", "def f(x):\n    return x", "é", "\U0001f33e", "  "])
PIECES = st.lists(
    st.one_of(
        st.builds(text, WORDS, st.integers(0, 5), st.booleans(), st.just(True)),
        st.builds(token, st.integers(0, 2**31 - 1), st.integers(0, 5), st.booleans()),
    ),
    min_size=1,
    max_size=6,
)


@given(sequences=st.lists(PIECES, min_size=1, max_size=5))
def test_a_batch_is_the_sum_of_its_pieces(small, sequences):
    found = encoded(small, *sequences)
    assert found.ids.dtype == np.int32
    assert found.trained.dtype == np.int8
    assert found.offsets.dtype == np.int64
    assert found.lengths.tolist() == np.diff(found.offsets).tolist()
    for number, pieces in enumerate(sequences):
        each = [
            [piece.token] if piece.text is None else small.encode(piece.text, add_special_tokens=False).ids
            for piece in pieces
        ]
        ids = list(itertools.chain(*each))
        loss = [int(piece.trained) for piece, tokens in zip(pieces, each, strict=True) for _ in tokens]
        assert lists(found, number) == (ids, loss)
    assert found.offsets[0] == 0
    assert found.offsets[-1] == len(found.ids) == len(found.trained)
    assert not found.straddled.any()


@given(sequences=st.lists(PIECES, min_size=1, max_size=5))
def test_roles_are_runs_that_begin_anew_with_every_sequence(small, sequences):
    found = encoded(small, *sequences)
    expected, runs = [], []
    for number, pieces in enumerate(sequences):
        roles = [
            piece.role
            for piece in pieces
            for _ in ([0] if piece.text is None else small.encode(piece.text, add_special_tokens=False).ids)
        ]
        expected += roles
        start = int(found.offsets[number])
        runs += [start + place for place, role in enumerate(roles) if not place or role != roles[place - 1]]
    written = dict(zip(found.role_starts.tolist(), found.roles.tolist(), strict=True))
    read, role = [], None
    for place in range(len(expected)):
        role = written.get(place, role)
        read.append(role)
    assert read == expected
    assert found.roles.dtype == np.int8
    assert found.role_starts.dtype == np.int64
    if all(piece.text != "" for pieces in sequences for piece in pieces):
        assert found.role_starts.tolist() == runs


def test_a_piece_without_tokens_begins_no_run():
    silent = merging(alphabet="abc", normalizer=normalizers.Replace("c", ""))
    said = [("a", SYSTEM), ("c", USER), ("b", ASSISTANT), ("c", SYSTEM), ("b", ASSISTANT)]
    found = encoded(silent, [text(words, role, breaks=True) for words, role in said])
    assert found.ids.tolist() == [0, 1, 1]
    assert (found.role_starts.tolist(), found.roles.tolist()) == ([0, 1], [SYSTEM, ASSISTANT])


def test_repeated_text_is_encoded_once(small):
    batch, listening = Batch(), Listening(small)
    for _ in range(3):
        again = text(" again", ASSISTANT, trained=True, breaks=True)
        batch.add([text("history"), token(7), text("\n"), again, text("\n", breaks=True)])
    batch.add(mixed("history again", (7, 6)))
    found = batch.encode(listening)
    (asked,) = listening.asked
    assert sorted(asked) == sorted({"history", "\n", " again", "history again"})
    assert [lists(found, number) for number in (1, 2)] == [lists(found, 0)] * 2
    assert found.straddled.tolist() == [0] * 4


# Cutting a rendering into pieces.


def unfolded(pieces):
    """Per character (or control token) of the pieces: what it is, by whom, and whether it is learned."""
    names = {number: name for name, number in CONTROLS.ids.items()}
    found = []
    for piece in pieces:
        assert piece.text != "", "an empty text is no segment"
        parts = [names[piece.token]] if piece.text is None else piece.text
        found += [(part, piece.role, piece.trained) for part in parts]
    return found


@st.composite
def passages(draw):
    """A rendering, and its passages with what is learned in each."""
    rendering = "".join(draw(st.lists(st.sampled_from(["<s>", "</s>", "a", "b", "\n", "<", "s>"]), max_size=14)))
    stops = sorted(draw(st.lists(st.integers(0, len(rendering)), max_size=4)))
    found, start = [], 0
    for stop in [*stops, len(rendering)]:
        role = draw(st.integers(0, 5))
        borders = sorted(draw(st.sets(st.integers(start, stop), max_size=4)))
        ranges = list(zip(borders[::2], borders[1::2], strict=False))
        generation = draw(st.just(-1) | st.integers(start, stop))
        found.append(Passage(stop, role, ranges, generation))
        start = stop
    return rendering, found


@pytest.mark.slow
@given(passages())
def test_a_rendering_is_cut_at_its_control_tokens_and_keeps_its_roles_and_borders(drawn):
    rendering, cuts = drawn
    groups = cut(rendering, cuts, CONTROLS)
    expected, place = [], 0
    for part in CONTROLS.pattern.split(rendering):
        control = part in CONTROLS.ids
        for characters in [part] if control else part:
            passage = next(each for each in cuts if place < each.stop)
            stop = place + len(characters)
            learned = any(start <= place and stop <= end for start, end in passage.trained)
            expected.append((characters, passage.role, learned))
            place = stop
    assert [each for group in groups for each in unfolded(group)] == expected
    assert len(groups) == len(cuts)


@given(passages())
def test_a_text_is_cut_where_generation_begins_and_nowhere_else(drawn):
    rendering, cuts = drawn
    pieces = [piece for group in cut(rendering, cuts, CONTROLS) for piece in group]
    borders = list(
        itertools.accumulate(
            (3 + (piece.token == 91) if piece.text is None else len(piece.text) for piece in pieces), initial=0
        )
    )
    begins = {place for place, piece in zip(borders, pieces, strict=False) if piece.breaks}
    inside_token = {
        place for match in CONTROLS.pattern.finditer(rendering) for place in range(match.start(), match.end())
    }
    wanted = {each.generation for each in cuts if each.generation >= 0} - inside_token
    starts = [0, *(each.stop for each in cuts[:-1])]
    within = {each.generation for start, each in zip(starts, cuts, strict=True) if start <= each.generation < each.stop}
    assert begins == wanted & within
    tokens = {place for match in CONTROLS.pattern.finditer(rendering) for place in match.span()}
    trained = {border for each in cuts for border in itertools.chain(*each.trained)}
    assert set(borders) <= {0, len(rendering)} | tokens | within | trained | {each.stop for each in cuts}


@given(passages())
def test_texts_that_meet_are_joined_unless_generation_begins_between_them(drawn):
    rendering, cuts = drawn
    groups = cut(rendering, cuts, CONTROLS)
    pieces = connected(groups)
    flat = [each for group in groups for each in unfolded(group)]
    joined = unfolded(pieces)
    assert [(what, learned) for what, _, learned in joined] == [(what, learned) for what, _, learned in flat]
    assert all(len({segment.role for segment in run}) == 1 for run in runs_of(pieces))
    assert [piece.breaks for piece in pieces].count(True) == [
        piece.breaks for group in groups for piece in group
    ].count(True)


JOINS = [
    ([text("a")], [text("b")], [text("ab")]),
    ([text("a", trained=True)], [text("b", ASSISTANT, trained=True)], [text("ab", trained=True)]),
    ([text("a")], [text("b", trained=True)], [text("a"), text("b", trained=True)]),
    ([text("a", trained=True)], [text("b")], [text("a", trained=True), text("b")]),
    (mixed("aa", (1, 1)), [text("b", trained=True)], mixed("aab", (1, 2))),
    (mixed("aa", (1, 1)), [text("b")], mixed("aab", (1, 1, 1))),
    (mixed("aa", (0, 1, 1)), mixed("bb", (1, 1)), mixed("aabb", (0, 1, 2, 1))),
    ([text("a", trained=True)], [text("b", trained=True, breaks=True)], [text("a", trained=True), text("b", trained=True, breaks=True)]),
    ([token(90)], [text("b")], [token(90), text("b")]),
    ([text("a")], [token(91)], [text("a"), token(91)]),
    ([text("a")], [], [text("a")]),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right", "whole"), JOINS)
def test_joining(left, right, whole):
    assert connected([left, right]) == whole
