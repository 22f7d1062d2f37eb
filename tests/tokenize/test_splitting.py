"""A tiktoken encoding as a tokenizer.json, held against tiktoken itself."""

import itertools

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenmill.tasks.tokenize.gate import NASTY, nasty_strings
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.splitting import tiktoken_definition

from tests.tokenize.small_vocabularies import ids_of

LETTERS = {bytes([byte]): byte for byte in range(256)}


@pytest.fixture(scope="module", params=["cl100k_base", pytest.param("o200k_harmony", marks=pytest.mark.slow)])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def vocabulary(name):
    return find_vocabulary(TokenizerSource(model=name))


@pytest.fixture(scope="module")
def encoding(vocabulary, name):
    return tiktoken.get_encoding(name)


@pytest.fixture(scope="module")
def converted(vocabulary):
    return Tokenizer.from_buffer(vocabulary.definition())


def encoded(tokenizer, texts, *, literal):
    tokenizer.encode_special_tokens = literal
    return ids_of(tokenizer, texts)


def texts(vocabulary):
    """Without the aliases of control strings: a tokenizer.json has one for each id."""
    aliases = set(vocabulary.controls) - {vocabulary.decode([number]) for number in vocabulary.controls.values()}
    assert aliases <= {"<|reserved_200018|>"}
    return [text for text in nasty_strings(vocabulary) if not any(alias in text for alias in aliases)]


@pytest.mark.slow
@given(
    text=st.text()
    | st.text("aA1é中😀 \n\r\t\u0301\u2028'.<|>/")
    | st.text("'\u2019sS\u017ftTrReEvVlLmMdD1ß\u212a ")
    | st.lists(st.sampled_from(NASTY), max_size=4).map("".join)
)
def test_text_round_trips_like_tiktoken(encoding, converted, text):
    (ids,) = encoded(converted, [text], literal=True)
    assert ids == encoding.encode_ordinary(text)
    assert converted.decode(ids, skip_special_tokens=False) == encoding.decode(ids)


@pytest.mark.slow
@given(data=st.data())
def test_non_text_tokens_decode_alike(encoding, converted, data):
    ids = data.draw(st.lists(st.integers(0, encoding.n_vocab - 1).filter(lambda number: is_token(encoding, number))))
    assert converted.decode(ids, skip_special_tokens=False) == encoding.decode(ids)


def is_token(encoding, number):
    try:
        encoding.decode_single_token_bytes(number)
    except KeyError:
        return False
    return True


@pytest.mark.slow
def test_every_control_string_has_the_id_that_it_has_in_tiktoken(vocabulary, encoding, converted):
    converted.encode_special_tokens = False
    for number in {encoding.encode_single_token(token) for token in encoding.special_tokens_set}:
        token = encoding.decode([number])
        assert converted.encode(token).ids == [number]
        assert converted.decode([number], skip_special_tokens=False) == token
        assert converted.decode([number]) == ""
    added = converted.get_added_tokens_decoder()
    assert set(added) == set(vocabulary.controls.values())
    assert all(token.special for token in added.values())


def test_lowest_rank_merges_first():
    ranks = {**LETTERS, b"bc": 256, b"ab": 257, b"cd": 258, b"abc": 259, b"bcd": 260, b"abcd": 261, b"aab": 262}
    small = tiktoken.Encoding("small", pat_str="[a-z]+", mergeable_ranks=ranks, special_tokens={"<|stop|>": 300})
    converted = Tokenizer.from_buffer(tiktoken_definition(small))
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=6)]
    assert encoded(converted, words, literal=True) == [small.encode_ordinary(word) for word in words]
    assert encoded(converted, ["ab<|stop|>c"], literal=False) == [[257, 300, ord("c")]]
