"""Added tokens that compete for characters: documents in which they meet get the reference's ids, in both modes."""

import hashlib
import itertools
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenmill.tasks.tokenize import exact
from tokenmill.tasks.tokenize.added import AddedTokens
from tokenmill.tasks.tokenize.encoders import ENGINES
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.gate import by_reference, compare, nasty_strings
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.tokenize.small_vocabularies import byte_level_bpe

BLANKS = {"normalized": [AddedToken(" " * size, normalized=True) for size in range(8, 1, -1)]}
BLANKS["as they are"] = [AddedToken(" " * size, normalized=False) for size in range(8, 1, -1)]

EATING = AddedToken("</s>", lstrip=True, normalized=False)
LAYOUTS = {
    "a special token strips, normalized blanks": [*BLANKS["normalized"], AddedToken("[MASK]", lstrip=True, special=True)],
    "a token strips, normalized blanks": [*BLANKS["normalized"], EATING],
    "a token strips, blanks": [*BLANKS["as they are"], AddedToken("</s>", rstrip=True, normalized=False)],
    "a token ends in a blank": [AddedToken("<x> ", normalized=False), EATING],
    "tabs": [AddedToken("\t\t", normalized=True), AddedToken("<m>", rstrip=True, lstrip=True, normalized=False)],
    "overlap of a special token": [AddedToken("<ab", special=True), AddedToken("b>", normalized=False)],
    "overlap of a word": [AddedToken("foo bar", single_word=True, normalized=False), AddedToken("bar-", normalized=False)],
    "a word beside blanks": [AddedToken("##", single_word=True, normalized=False), AddedToken("\u00a0\u00a0", normalized=False)],
    "overlap across steps": [AddedToken("ab", normalized=True), AddedToken("bc", normalized=False)],
    "one holds the other": [AddedToken("abc", normalized=True), AddedToken("b", normalized=False)],
}  # fmt: skip
COMPOSED = {
    "a mark joins its end": [AddedToken("foo", normalized=True)],
    "a mark joins across a mark": [AddedToken("fooe", normalized=True)],
    "it begins with a mark": [AddedToken("\u0301x", normalized=True)],
    "a character that NFC writes as its own": [AddedToken("K;", normalized=True)],
    "a vowel joins its end": [AddedToken("\u1100", normalized=True)],
}
JOINED = [
    "wordfoo\u0301x",
    "fooe\u0327\u0301 foo",
    "a\u0301x e\u0301x",
    "\u212a\u037e K;",
    "\u1100\u1161 \u1100",
    "plain foo K; text",
]
TEXTS = [
    "plain words    </s> more words\n    </s>", "if x:</s>    return 1", "a   [MASK] b and   [MASK] c", "1.</s>\t  b", "no marker   at all",
    "<x> </s> <x>   </s>", "a\t\t<m>\t\tb \t<m> \t\t", "<ab> ab> <ab", "xfoo bar-y foo bar- foo bar", "abc aabcc",
    "a\n\n\n\u00a0\u00a0\u00a0##\u0301 ##aa", "word\n\n  ##aa ##",
]  # fmt: skip


def saved(folder, added, normalizer=None):
    place = byte_level_bpe(folder / "model") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(place))
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.save(str(place))
    return find_vocabulary(TokenizerSource(model=str(folder / "model")))


def passes_gate(vocabulary, engine, literal):
    expected = by_reference(vocabulary, nasty_strings(vocabulary), literal=literal)
    return compare(vocabulary, engine, expected, literal=literal).difference is None


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["tangles", "gate"])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_compete(tmp_path, monkeypatch, layout, normalizer, guard):
    """Either guard alone is enough: the gate's texts refuse engines that would err, or such documents go to the reference."""
    monkeypatch.setattr(exact, "_suspects_of", lambda *_: [])
    if guard == "gate":
        monkeypatch.setattr(AddedTokens, "tangles", lambda *_, **__: [])
    vocabulary = saved(tmp_path, LAYOUTS[layout], normalizer)
    texts = pa.array(TEXTS, pa.large_string())
    passed = 0
    for literal, engine in itertools.product((True, False), ENGINES):
        if guard == "tangles" or passes_gate(vocabulary, engine, literal):
            with suppress(ValueError):  # the engine isn't used
                found = exact_encoder(vocabulary, engine, literal=literal).encode(texts)
                assert np.array_equal(found.ids, vocabulary.reference(literal).encode(texts).ids)
                passed += found.by_reference < len(TEXTS)
    exact_encoder.cache_clear()
    assert passed or normalizer or guard == "gate"


@pytest.mark.parametrize("guard", ["tangles", "gate"])
@pytest.mark.parametrize("layout", COMPOSED)
def test_marks_that_nfc_joins_with_a_token(tmp_path, monkeypatch, layout, guard):
    monkeypatch.setattr(exact, "_suspects_of", lambda *_: [])
    if guard == "gate":
        monkeypatch.setattr(AddedTokens, "tangles", lambda *_, **__: [])
    vocabulary = saved(tmp_path, COMPOSED[layout], normalizers.NFC())
    texts = pa.array(JOINED, pa.large_string())
    for engine in ENGINES:
        if guard == "tangles" or passes_gate(vocabulary, engine, True):
            found = exact_encoder(vocabulary, engine, literal=True).encode(texts)
            assert found.ids.tolist() == vocabulary.reference(True).encode(texts).ids.tolist()
            assert found.by_reference < len(texts)
    exact_encoder.cache_clear()


def test_only_affected_tokenizers_get_new_keys(tmp_path):
    def before(folder):
        hasher = hashlib.sha256()
        for part in (b"huggingface", (folder / "model/tokenizer.json").read_bytes()):
            hasher.update(len(part).to_bytes(8, "little") + part)
        return f"sha256:{hasher.hexdigest()}"

    stripping = [AddedToken("<mask>", lstrip=True, special=True)]
    for name, added in (("blanks", BLANKS["normalized"]), ("stripping", stripping)):
        assert saved(tmp_path / name, added).fingerprint == before(tmp_path / name)
    for number, added in enumerate(LAYOUTS.values()):
        assert saved(tmp_path / str(number), added).fingerprint != before(tmp_path / str(number))
