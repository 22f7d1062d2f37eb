"""The sweep against libraries whose tables are known to differ: one library with the classes of an expression changed."""

import unicodedata

import orjson
import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenmill.tasks.tokenize import sweep
from tokenmill.tasks.tokenize.encoders import ENGINES, ReferenceEncoder
from tokenmill.tasks.tokenize.splitting import BYTE_LEVEL_PATTERN, Splitting, byte_level_bpe, huggingface_splitting
from tokenmill.tasks.tokenize.sweep import (
    Context,
    contexts,
    cut_differently,
    differing,
    examples,
    normalized_differently,
)

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN = r"\p{Han}+|\p{N}| ?[\p{L}&&[^\p{Han}]]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PUNCTUATION = r"\p{N}{1,3}|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A sweep of the first scripts and of one with younger marks, by one character of each class that is told apart here."""
    monkeypatch.setattr(sweep, "SWEPT", (range(0x80, 0x840), range(0x11900, 0x11980)))
    monkeypatch.setattr(sweep, "CLASSES", "Ààǅʰª中\u0301٣«±\u00a0\u0378")


def cutting(pattern):
    """Makes the reference library's encoder of a pattern."""

    def encoder(ranks):
        tokenizer = byte_level_bpe(ranks)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return ReferenceEncoder(lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)])

    return encoder


def splitting(pattern, other):
    """The pattern, run by a library that reads `other` instead."""
    return Splitting(
        [pattern, other], lambda: [pattern], lambda ranks: (cutting(other)(ranks), cutting(pattern)(ranks))
    )


def without(name, characters):
    """The class of a property without some characters that really have it."""
    return rf"[\p{{{name}}}&&[^{characters}]]"


@pytest.mark.parametrize(
    ("pattern", "name", "unknown"),
    [
        pytest.param(BYTE_LEVEL_PATTERN, "L", "éЖא", marks=pytest.mark.slow),
        pytest.param(BYTE_LEVEL_PATTERN, "N", "²٣", marks=pytest.mark.slow),
        pytest.param(CL100K, "L", "ʰج", marks=pytest.mark.slow),
        pytest.param(O200K, "M", "\u0301\u0483", marks=pytest.mark.slow),
        (O200K, "Ll", "àж"),
        (PUNCTUATION, "P", "«܀"),
        (PUNCTUATION, "S", "±"),
    ],
)
def test_exactly_the_characters_that_one_library_does_not_know_are_found(pattern, name, unknown):
    other = pattern.replace(rf"\p{{{name}}}", without(name, unknown))
    assert cut_differently(splitting(pattern, other)) == set(map(ord, unknown))


@pytest.mark.slow
def test_a_class_that_grew_is_found_and_so_is_a_blank():
    more = BYTE_LEVEL_PATTERN.replace(r"\p{L}", r"[\p{L}¡]")
    assert cut_differently(splitting(BYTE_LEVEL_PATTERN, more)) == {0xA1}
    fewer = CL100K.replace(r"[^\s\p{L}", r"[^[\s&&[^\x{85}]]\p{L}").replace(r"\s+", r"[\s&&[^\x{85}]]+")
    assert cut_differently(splitting(CL100K, fewer)) == {0x85}


def test_scripts_in_an_expression_are_separated(monkeypatch):
    monkeypatch.setattr(sweep, "SWEPT", (range(0x3400, 0x3500), range(0x4E00, 0x4F00)))
    other = HAN.replace(r"\p{Han}", r"[\p{Han}&&[^\x{3401}\x{4E05}]]")
    assert cut_differently(splitting(HAN, other)) == {0x3401, 0x4E05}


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [CL100K.replace("|'ll", ""), CL100K.replace("{1,3}", "{1,2}"), CL100K.replace(r"[^\r\n\p{L}\p{N}]?", "")]
)
def test_incompatible_expression_is_rejected(other):
    with pytest.raises(ValueError, match="other pieces than the reference"):
        cut_differently(splitting(CL100K, other))


def test_each_alternative_and_each_border_between_two_is_written_out():
    assert examples([r"'(?:[sd]|ll)| ?\p{L}+|\s+(?!\S)"]) == [" ", " a", "'d", "'ll", "a"]
    found = set(contexts([r"'(?:[sd]|ll)| ?\p{L}+|\s+(?!\S)"]))
    alternatives = {Context("", ""), Context("'", ""), Context("", "ll"), Context("'", "l"), Context("'l", "")}
    borders = {Context("a", "'ll"), Context("", "'ll"), Context(" ", "'d"), Context("'ll", " "), Context("'l", " a")}
    assert (alternatives | borders) <= found


YOUNG = "\u07fd\u0816\u0817\U00011930\U00011935\U0001193d\U0001193e"
"""Marks and letters that came after 2002; two of them combine, others have combining classes."""


def of_old(text):
    """NFC by a library that does not know YOUNG: they stay as they are, and nothing passes them."""
    written, rest = "", ""
    for character in text:
        if character in YOUNG:
            written, rest = written + unicodedata.normalize("NFC", rest) + character, ""
        else:
            rest += character
    return written + unicodedata.normalize("NFC", rest)


def test_characters_that_only_one_library_can_normalize_are_found():
    def of_new(text):
        return unicodedata.normalize("NFC", text)

    found = normalized_differently(lambda texts: [*map(of_new, texts)], lambda texts: [*map(of_old, texts)])
    assert found <= set(map(ord, YOUNG))
    assert {0x07FD, 0x1193D, 0x1193E} <= found, "marks that change places"
    assert {0x11930, 0x11935} & found, "letters that combine"
    rest = [chr(number) for planes in sweep.SWEPT for number in planes if number not in found]
    for character in rest:
        for other in "e\u0301\u0334\u0323" + YOUNG:
            text = f"a{character}{other}\u0327{character}"
            if not found & set(map(ord, text)):
                assert of_new(text) == of_old(text)


def test_groups_are_divided_down_to_the_characters_that_differ():
    def alike(texts):
        return [not set("éЖ") & set(text) for text in texts]

    assert sorted(differing("<{}>".format, range(0x80, 0x800), alike)) == [ord("é"), ord("Ж")]


def test_tokenizer_json_is_cut_and_normalized_as_defined():
    normal = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC()])
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.normalizer = normal
    found = huggingface_splitting(orjson.loads(tokenizer.to_str()), ENGINES["gigatoken"])
    assert found is not None
    assert found.normal_forms is not None
    assert found.patterns() == [BYTE_LEVEL_PATTERN]
    fast, reference = found.normal_forms()
    texts = ["e\u0301 x", "", "a"]
    assert fast(texts) == reference(texts) == ["\u00e9 x", "", "a"]


def test_only_byte_level_bpe_has_a_splitting():
    word_piece = {"model": {"type": "WordPiece"}, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    for definition in (word_piece, {"model": {"type": "BPE", "byte_fallback": True}, "pre_tokenizer": None}):
        assert huggingface_splitting(definition, ENGINES["gigatoken"]) is None
