"""Every kind of tokenizer is found, read as its own library reads it, and refused in words when it cannot be used."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import PretrainSettings, TokenizerSettings

from tests.examples import max_examples
from tests.preparing import blend_of, prepare, write_lines
from tests.tokenize.small_vocabularies import (
    BOS,
    EOS,
    TRAINING_TEXT,
    TURN,
    VERBATIM,
    byte_level_bpe,
    encoded,
    ids_of,
    load,
    reference,
    sentencepiece_model,
)

TEXTS = [line for text in TRAINING_TEXT for line in [text, *text.splitlines()] if line]


def described(vocabulary):
    return vocabulary.fingerprint, vocabulary.size, set(vocabulary.special_tokens), vocabulary.bos, vocabulary.eos


@pytest.mark.parametrize("literal", [True, False])
def test_a_folder_is_read_as_hugging_face_reads_it(small, literal):
    vocabulary = load(small)
    tokenizer = reference(small, literal=literal)
    texts = [*TEXTS, f"a{EOS}b {TURN}", EOS, f"{BOS}{BOS}"]
    expected = ids_of(tokenizer, texts)
    assert encoded(vocabulary.fast("gigatoken", literal), texts) == expected
    assert encoded(vocabulary.reference(literal), texts) == expected
    named = (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS))
    assert described(vocabulary)[1:] == (tokenizer.get_vocab_size(), {BOS, EOS, TURN}, *named)


def test_part_of_a_column_is_encoded_as_that_part(small):
    column = pa.array(TEXTS, pa.large_string())[5:25]
    expected = ids_of(reference(small), TEXTS[5:25])
    for encoder in (load(small).fast("gigatoken", True), load(small).reference(True)):
        found = encoder.encode(column)
        assert found.lengths.tolist() == [len(ids) for ids in expected]
        assert found.ids.tolist() == [number for ids in expected for number in ids]


def test_file_equals_its_folder(small):
    assert described(load(small / "tokenizer.json")) == described(load(small))


def test_the_fingerprint_is_of_the_content(small, directory, tmp_path):
    moved = shutil.copytree(small, tmp_path / "elsewhere")
    assert described(load(moved)) == described(load(small))
    assert load(byte_level_bpe(tmp_path / "other", size=600)).fingerprint != load(small).fingerprint


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config.json": {"eos_token": EOS}}, EOS),
        ({"tokenizer_config.json": {"eos_token": {"content": TURN, "special": True}}}, TURN),
        ({"special_tokens_map.json": {"eos_token": EOS}}, EOS),
        ({"special_tokens_map.json": {"eos_token": EOS}, "tokenizer_config.json": {"eos_token": None}}, EOS),
        ({"special_tokens_map.json": {"eos_token": EOS}, "tokenizer_config.json": {"eos_token": TURN}}, TURN),
    ],
)
def test_end_of_document_is_named_by_the_config(small, tmp_path, files, named):
    shutil.copy(small / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    assert load(tmp_path).eos == reference(small).token_to_id(named)


MODELS = {
    "verbatim": ("bpe", VERBATIM, "gigatoken"),
    "normalized": ("bpe", {}, "reference"),  # gigatoken strips more from the ends of a text than SentencePiece does
    "unigram": ("unigram", {}, "reference"),  # gigatoken has none
}
"""SentencePiece models by name: the algorithm, the options, and the encoder that is exact."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "normalized")) for name in MODELS]
)
def model(request, directory):
    kind, options, _ = MODELS[request.param]
    return sentencepiece_model(directory / f"{request.param}.model", kind, **options)


@pytest.mark.slow
def test_sentencepiece_is_read_as_sentencepiece_reads_it(model, tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = load(model)
    assert described(vocabulary)[1:] == (len(processor), {"<s>", "</s>"}, processor.bos_id(), processor.eos_id())
    texts = [*TEXTS, "<s> and </s> in text", " x", "x ", "  a   b  "]
    expected = processor.encode(texts)
    assert encoded(vocabulary.reference(True), texts) == expected
    source = write_lines(tmp_path / "some.jsonl", texts)
    planned, manifest = prepare(
        blend_of(source), tmp_path / "out", tokenizer={"model": str(model), "add_bos": True},
        holdout={"valid": 0, "test": 0},
    )  # fmt: skip
    assert [verdict.backend for verdict in planned.found.verdicts.values()] == [MODELS[model.stem][2]]
    [content] = [path.read_bytes() for path in (tmp_path / "out/train").glob("*.bin")]
    documents = [[processor.bos_id(), *ids, processor.eos_id()] for ids in expected if ids]
    assert np.frombuffer(content, np.uint16).tolist() == [number for document in documents for number in document]
    assert manifest["totals"]["dropped"].get("empty_document", 0) == sum(not ids for ids in expected)


@pytest.fixture(scope="module")
def both(directory):
    """gigatoken's encoder of a SentencePiece model, and SentencePiece's own function."""
    model = sentencepiece_model(directory / "both.model", "bpe", **VERBATIM)
    return load(model).fast("gigatoken", True), sentencepiece.SentencePieceProcessor(model_file=str(model))


@max_examples(200)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cn", "Co"]), max_size=60))
def test_gigatoken_reads_any_text_as_sentencepiece_does(both, text):
    fast, processor = both
    assert encoded(fast, [text]) == [processor.encode(text)]


def refusal(model, **settings):
    with pytest.raises(InputError) as refused:
        load(model, **settings)
    return str(refused.value)


def test_a_missing_or_damaged_file_is_named(small, tmp_path):
    place = tmp_path / "tokenizer.json"
    assert refusal(place).endswith(f"file or folder not found: '{place}'; check the path")
    assert "File name too long; check the path" in refusal("x" * 300)
    assert "home directory.; check the path" in refusal("~nobody-at-all/x")
    shutil.copy(small / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ')
    assert str(tmp_path / "tokenizer_config.json") in refusal(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[SEP]", "chat_template": [{"x": 1}]}')
    assert load(tmp_path).chat_template is None


def test_invalid_definition_is_rejected(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Novel", "vocab": {"a": 0}, "merges": []}}')
    source = write_lines(tmp_path / "some.jsonl", ["text"])
    with pytest.raises(InputError, match=r"tokenizer\.model: "):
        prepare(blend_of(source), tmp_path / "out", tokenizer={"model": str(tmp_path), "add_eos": False})


@pytest.mark.parametrize("end", ["eos", "bos"])
def test_unnamed_end_is_rejected_only_when_needed(small, tmp_path, end):
    shutil.copy(small / "tokenizer.json", tmp_path)
    plain = {"add_bos": False, "add_eos": False}
    message = refusal(tmp_path, **{**plain, f"add_{end}": True})
    assert f"tokenizer.add_{end}: " in message
    assert f"set {end}_token in a tokenizer_config.json" in message
    assert f"set tokenizer.add_{end}=false" in message
    assert getattr(load(tmp_path, **plain), end) is None


def test_an_unknown_encoding_is_answered_with_the_nearest(hub):
    message = refusal("o200k_harmonie")
    assert "no such model on the Hub" in message
    assert "did you mean 'o200k_harmony'?" in message


def test_code_from_a_repository_is_never_run():
    settings = {"tokenizer": {"model": "org/name", "trust_remote_code": True}}
    with pytest.raises(InputError, match="trust_remote_code=true isn't supported: convert the tokenizer"):
        parse(PretrainSettings, settings, "settings")


@pytest.fixture
def nowhere():
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def offline(nowhere, tmp_path):
    """`offline(model, text)`: ids of the text by both encoders, or the InputError, of a process without a network."""
    program = """
import json, sys, time
import pyarrow as pa
time.sleep = lambda seconds: None  # the hub's client waits 23 s between its attempts
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings
texts = pa.array(json.loads(sys.argv[2]), pa.large_string())
try:
    vocabulary = load_vocabulary(TokenizerSettings(model=sys.argv[1], revision="0" * 40))
except InputError as error:
    print(json.dumps(str(error)))
else:
    made = [encoder.encode(texts) for encoder in (vocabulary.fast("gigatoken", True), vocabulary.reference(True))]
    print(json.dumps([[each.ids.tolist(), each.offsets.tolist()] for each in made] + [vocabulary.eos]))
"""

    def offline(model, *texts):
        proxies = dict.fromkeys(["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"], nowhere)
        kept = {name: value for name, value in os.environ.items() if name != "TIKTOKEN_CACHE_DIR"}
        ours = {"HF_ENDPOINT": nowhere, "XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
        run = subprocess.run(
            [sys.executable, "-c", program, model, json.dumps(texts)],
            env={**kept, **proxies, **ours, "no_proxy": "127.0.0.1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    return offline


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "eos"),
    [
        ("o200k_harmony", 199_999),
        pytest.param("o200k_base", 199_999, marks=pytest.mark.slow),
        pytest.param("cl100k_base", 100_257, marks=pytest.mark.slow),
    ],
)
def test_shipped_encodings_work_offline(offline, name, eos):
    from bpe_openai import get_encoding  # noqa: PLC0415 - half a second

    texts = ["Hello, world!", "  naïve 漢字 <|endoftext|>\n\n\tdef f(x): return 12345", "👩‍👩‍👧"]
    other = get_encoding(name.replace("_harmony", "_base"))
    expected = [other.encode_ordinary(text) for text in texts]
    ids = [number for document in expected for number in document]
    offsets = np.cumsum([0, *map(len, expected)]).tolist()
    assert offline(name, *texts) == [[ids, offsets], [ids, offsets], eos]


def test_ranks_are_found_after_the_environment_names_a_different_cache(tmp_path, monkeypatch):
    vocabulary = load_vocabulary(TokenizerSettings())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    assert vocabulary.decode([24912, 2375]) == "hello world"
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_unreachable_encoding_is_rejected(offline):
    message = offline("r50k_base")
    assert message.startswith("tokenizer.model: 'r50k_base' ")
    assert "network" in message
