import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.storage import user_cache
from tasks.tokenize import exact
from tasks.tokenize.exact import ExactEncoder, exact_encoder, suspects
from tasks.tokenize.load import load_vocabulary
from tasks.tokenize.settings import TokenizerSettings
from tests.peers import vocabularies
from tests.preparing import blend_of, prepare, write_lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: getattr(vocabularies, name)(folder / name) for name in ("deepseek", "qwen")}


def vocabulary(folder):
    return load_vocabulary(TokenizerSettings(model=str(folder)))


def column(texts):
    return pa.array(texts, pa.large_string())


def same(one, other):
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets)


def texts_with(characters, count, seed):
    """Ordinary words, with a few of the characters here and there."""
    source = random.Random(seed)
    words = ["mill", " grain", "\n", " 12", ".", "é", "中", "e\u0323", " "]
    return [
        "".join(source.choice(words) if source.random() < 0.8 else chr(source.choice(characters)) for _ in range(12))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["deepseek", "qwen"])
def test_texts_that_the_fast_encoder_gets_wrong_come_out_right(name, folders):
    known = vocabulary(folders[name])
    encoder = exact_encoder(known, literal=True)
    texts = texts_with(encoder.suspects, 4000, seed=1) + ["no such character"] * 50
    random.Random(2).shuffle(texts)
    expected = known.reference(True).encode(column(texts))
    assert not same(known.fast(True).encode(column(texts)), expected), "the test must hold texts that differ"
    assert same(encoder.encode(column(texts)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek", "qwen"])
def test_every_character_in_use_is_encoded_like_the_reference_in_other_surroundings(name, folders):
    known = vocabulary(folders[name])
    encoder = exact_encoder(known, literal=True)
    numbers = [number for planes in exact.CODE_POINTS for number in planes]
    for pattern in ("{0}{0}", "{0}a", "x {0}1", "e{0}\u0301", "\n{0}."):
        texts = column(
            ["\n".join(pattern.format(chr(each)) for each in numbers[at : at + 8]) for at in range(0, len(numbers), 8)]
        )
        assert same(encoder.encode(texts), known.reference(True).encode(texts)), pattern


class Numbering:
    """Encodes each character as its number plus a constant, and counts what it was given."""

    def __init__(self, plus):
        self.plus = plus
        self.seen = []

    def encode(self, texts):
        self.seen += texts.to_pylist()
        documents = [np.array([ord(each) + self.plus for each in text], np.uint32) for text in texts.to_pylist()]
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return exact.Tokens(np.concatenate([np.empty(0, np.uint32), *documents]), offsets)


@given(st.lists(st.text("abcé中😀\U00011de7", max_size=6), max_size=12), st.sets(st.sampled_from("é中😀\U00011de7")))
def test_exactly_the_texts_with_a_suspect_go_to_the_reference(texts, characters):
    reference = Numbering(plus=1_000_000)
    encoder = ExactEncoder(Numbering(plus=0), lambda: reference, sorted(map(ord, characters)))
    tokens = encoder.encode(column(texts))
    expected = [text for text in texts if characters & set(text)]
    assert reference.seen == expected
    for number, text in enumerate(texts):
        plus = 1_000_000 if text in expected else 0
        found = tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]]
        assert found.tolist() == [ord(each) + plus for each in text]


def test_the_sweep_finds_exactly_the_characters_that_differ():
    class Odd(Numbering):
        def encode(self, texts):
            tokens = super().encode(texts)
            tokens.ids[np.isin(tokens.ids, [0x100, 0x1F600, 0x323B0])] = 7
            return tokens

    assert suspects(Odd(0), Numbering(0)) == [0x100, 0x1F600, 0x323B0]


def test_a_sweep_is_remembered_and_a_damaged_memory_is_made_again(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exact, "suspects", lambda *_: [5, 6, 9])
    known = vocabulary(folders["qwen"])
    exact_encoder.cache_clear()
    assert exact_encoder(known, literal=True).suspects == [5, 6, 9]

    def refuse(*_):
        raise AssertionError("swept again")

    monkeypatch.setattr(exact, "suspects", refuse)
    exact_encoder.cache_clear()
    assert exact_encoder(known, literal=True).suspects == [5, 6, 9]

    (memory,) = (tmp_path / "tokenmill" / "characters").iterdir()
    assert str(memory).startswith(user_cache("characters"))
    memory.write_bytes(memory.read_bytes().replace(b" 9", b" 8"))
    monkeypatch.setattr(exact, "suspects", lambda *_: [7])
    exact_encoder.cache_clear()
    assert exact_encoder(known, literal=True).suspects == [7]
    exact_encoder.cache_clear()


def test_the_receipt_counts_documents_that_went_to_the_reference(folders, tmp_path):
    known = vocabulary(folders["deepseek"])
    odd = chr(exact_encoder(known, literal=True).suspects[0])
    source = write_lines(tmp_path / "a.jsonl", ["plain", f"with {odd} inside", "中文", f"{odd}{odd}"])
    planned, _ = prepare(blend_of(source), tmp_path / "out", tokenizer={"model": str(folders["deepseek"])})
    (receipt,) = planned.plan.store.proven(planned.plan.keys).values()
    assert receipt.identity["recipe"]["backend"] == "gigatoken"
    assert receipt.volatile["documents_by_reference"] == 2
