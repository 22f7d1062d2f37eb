"""The figures of a comparison are those that the libraries themselves give, text by text and token by token."""

import re

import numpy as np
import orjson
import pytest
import sentencepiece
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.fertility import LONG_BYTES, TextCounts, TokenCounts, count_texts, count_tokens, kinds_of
from tokenmill.tasks.tokenize.gate import NASTY
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.examples import max_examples
from tests.peers import vocabularies
from tests.tokenize.small_vocabularies import VERBATIM, column, sentencepiece_model

TEXTS = [
    *NASTY,
    "Mühle und Korn. 水車小屋で粉を挽く。 Мельница мелет зерно. المطحنة تطحن الحبوب. 🫠🫡🫨",
    "    if configuration is None:\n                raise ValueError('internationalization') from error\n" * 3,
    "<|endoftext|> a <|endoftext|><\uff5cend▁of▁sentence\uff5c> <|im_end|> <|return|>",
]


def is_text(spelled):
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True


def by_tiktoken(texts):
    """Tokens, those that are no whole characters, and long ones, from tiktoken alone."""
    encoding = tiktoken.get_encoding("o200k_harmony")
    spelled = [encoding.decode_single_token_bytes(each) for text in texts for each in encoding.encode_ordinary(text)]
    return len(spelled), sum(not is_text(each) for each in spelled), sum(len(each) >= LONG_BYTES for each in spelled)


def by_tokenizers(folder, texts):
    """The same from `tokenizers` alone: it decodes what is no whole character to U+FFFD."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    ids = [each for text in texts for each in tokenizer.encode(text, add_special_tokens=False).ids]
    known = {each: tokenizer.decode([each], skip_special_tokens=False) for each in set(ids)}
    replacing = set(tokenizer.encode("\ufffd", add_special_tokens=False).ids)
    assert all(known[each] == "\ufffd" for each in replacing if len(replacing) == 1)
    whole = replacing if len(replacing) == 1 else set()
    broken = [each for each in ids if "\ufffd" in known[each] and each not in whole]
    # A letter of a byte-level BPE is a byte; U+FFFD says nothing of how many there were, so lengths are those of the piece.
    long = [each for each in ids if len(tokenizer.id_to_token(each)) >= LONG_BYTES]
    return len(ids), len(broken), len(long)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["o200k_harmony", "deepseek", "qwen"])
def test_real_vocabularies_match_their_libraries(name, tmp_path_factory):
    folder = None if name == "o200k_harmony" else vocabularies.FAMILIES[name](tmp_path_factory.mktemp("vocabularies"))
    vocabulary = find_vocabulary(TokenizerSource(model=str(folder or name)))
    encoder, kinds = exact_encoder(vocabulary, "gigatoken", literal=True), kinds_of(vocabulary)
    found = count_tokens(column(TEXTS), encoder, kinds)
    expected = by_tokenizers(folder, TEXTS) if folder else by_tiktoken(TEXTS)
    assert (found.tokens, found.fallback, found.long) == expected
    assert min(expected) > 0
    controls = re.compile("|".join(map(re.escape, vocabulary.special_tokens)))
    assert found.controls == sum(len(controls.findall(text)) for text in TEXTS) > 0
    assert found.seconds > 0


def test_pieces_for_bytes_of_sentencepiece_are_fallback_also_for_ascii(tmp_path):
    path = sentencepiece_model(tmp_path / "small.model", "bpe", **VERBATIM)
    vocabulary = find_vocabulary(TokenizerSource(model=str(path)))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = processor.Encode("mill\n\x07 水", out_type=int)
    assert "<0x07>" in map(processor.IdToPiece, ids)
    found = count_tokens(column(["mill\n\x07 水"]), vocabulary.reference(True), kinds_of(vocabulary))
    assert found.tokens == len(ids)
    assert found.fallback == sum(map(processor.IsByte, ids)) > 3
    kinds = kinds_of(vocabulary)
    assert kinds.fallback.tolist() == [processor.IsByte(each) for each in range(processor.GetPieceSize())]


def test_a_long_token_of_pieces_counts_its_text(tmp_path):
    """A piece of Unigram, whose space is one byte of text and three of the piece."""
    long = "\u2581" + "x" * (LONG_BYTES - 1)
    listed = [["<unk>", 0.0], [long, -1.0], [long[:-1], -1.0], ["\u2581", -2.0]]
    definition = {"model": {"type": "Unigram", "unk_id": 0, "vocab": listed}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(definition))
    kinds = kinds_of(find_vocabulary(TokenizerSource(model=str(tmp_path))))
    assert kinds.long.tolist() == [False, True, False, False]
    assert not kinds.fallback.any()
    assert kinds.controls is None


WORDY = st.text(
    st.characters(codec="utf-8") | st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u2003\u2028\u3000\u200b")
)


@max_examples(200)
@given(texts=st.lists(WORDY, max_size=5))
@example(texts=["ends with separators \x1c\x1f"] * 5)
def test_texts_are_counted_as_python_counts_them(texts):
    found = count_texts(column(texts))
    assert found == TextCounts(
        documents=len(texts),
        size=sum(len(text.encode()) for text in texts),
        characters=sum(map(len, texts)),
        words=sum(len(text.split()) for text in texts),
    )


@pytest.mark.slow
def test_counts_in_parts_of_a_batch_add_up():
    """Also of a slice of an Arrow array, whose buffers hold more than its texts."""
    whole = column(TEXTS)
    assert count_texts(whole[:7]) + count_texts(whole[7:]) == count_texts(whole)
    vocabulary = find_vocabulary(TokenizerSource(model="o200k_harmony"))
    encoder, kinds = vocabulary.reference(True), kinds_of(vocabulary)
    parts = count_tokens(whole[:7], encoder, kinds) + count_tokens(whole[7:], encoder, kinds)
    every = count_tokens(whole, encoder, kinds)
    assert np.array_equal(
        [parts.tokens, parts.fallback, parts.long, parts.controls],
        [every.tokens, every.fallback, every.long, every.controls],
    )
    assert TokenCounts(1, 2, 3, 4, 0.5) + TokenCounts(1, 1, 1, 1, 0.25) == TokenCounts(2, 3, 4, 5, 0.75)
