"""What is published is, byte for byte, what Megatron's own loop writes; and Megatron trains from it as the blend says."""

import json
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from tokenmill.tasks.tokenize.gate import NASTY

from tests.peers import megatron_loop, vocabularies
from tests.preparing import blend_of, prefixes_of, prepare, write_lines
from tests.tokenize.small_vocabularies import EOS, Identity, ids_of, reference

NOTHING_HELD_OUT = {"valid": 0, "test": 0}
CONTROL = [
    "<|endoftext|>",
    "before<|endoftext|>after <|im_start|>user\nhi<|im_end|>\n",
    "<|start|>assistant<|channel|>final<|message|>done<|return|><|end|>",
    "<｜end▁of▁sentence｜><｜begin▁of▁sentence｜> <｜User｜>question<｜Assistant｜>",  # noqa: RUF001 - as DeepSeek writes it
    f"<s>{EOS} <|turn|>{EOS[:-1]}",
]
CODE = Path(textwrap.__file__).read_text("utf-8")
RUNS = [character * count for character in "a \n=.0\t👍漢" for count in (100, 1000, 4097)]
MIXED = "Ünïcödé русский 日本語 العربية हिन्दी ไทย 한국어 עברית ελληνικά 👩‍👩‍👧 fin\n" * 50
TEXTS = [text for text in [*NASTY, *CONTROL, CODE, CODE.upper(), MIXED, *CODE.splitlines(), *RUNS] if text]


@pytest.fixture(scope="module")
def nasty(directory):
    return write_lines(directory / "nasty.jsonl", TEXTS)


def megatron(source, folder, prefix, *, literal):
    """The files that Megatron's loop writes with the tokenizer in `folder`."""
    tokenizer = reference(folder, literal=literal)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    with source.open("rb") as lines:
        megatron_loop.preprocess(lines, tokenizer, vocabularies.end_of_document(folder), str(prefix), size)
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def ours(source, output, model, **settings):
    """The files that a preparation with nothing held out publishes, in order, and what the gate chose."""
    _, manifest = prepare(
        blend_of(source), output, tokenizer={"model": str(model)}, holdout=NOTHING_HELD_OUT, **settings
    )
    files = [(Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()) for prefix in prefixes_of(output)]
    return files, {verdict["backend"] for verdict in manifest["tokenizer"]["gate"].values()}


@pytest.mark.slow
@pytest.mark.parametrize("treatment", ["literal", "allow"])
@pytest.mark.parametrize("family", vocabularies.FAMILIES)
def test_real_vocabularies_give_megatrons_bytes(directory, nasty, tmp_path, family, treatment):
    folder = vocabularies.FAMILIES[family](directory)
    expected = megatron(nasty, folder, tmp_path / "megatron", literal=treatment == "literal")
    files, backends = ours(nasty, tmp_path / "ours", folder, special_tokens_in_text=treatment)
    assert files == [expected]
    assert backends == {"gigatoken"}


@pytest.mark.slow
@pytest.mark.parametrize("treatment", ["literal", "allow"])
def test_the_default_vocabulary_gives_megatrons_bytes(directory, nasty, tmp_path, monkeypatch, treatment):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabularies.tiktoken_cache(directory)))
    folder = vocabularies.o200k_harmony(directory)
    expected = megatron(nasty, folder, tmp_path / "megatron", literal=treatment == "literal")
    files, backends = ours(nasty, tmp_path / "ours", "o200k_harmony", special_tokens_in_text=treatment)
    assert files == [expected]
    assert backends == {"gigatoken"}


@pytest.mark.slow
def test_control_strings_make_the_two_treatments_differ(directory, nasty, tmp_path):
    folder = vocabularies.deepseek(directory)
    literal = megatron(nasty, folder, tmp_path / "literal", literal=True)
    assert literal != megatron(nasty, folder, tmp_path / "allow", literal=False)


def test_a_small_vocabulary_is_written_as_uint16(small, nasty, tmp_path):
    (bin_, idx), tokenizer = megatron(nasty, small, tmp_path / "megatron", literal=True), reference(small)
    files, backends = ours(nasty, tmp_path / "ours", small)
    assert files == [(bin_, idx)]
    assert backends == {"gigatoken"}
    assert len(bin_) == 2 * sum(len(ids) + 1 for ids in ids_of(tokenizer, TEXTS))


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [1, 7, 1001, 4096, 65_537])
def test_shards_put_end_to_end_are_the_one_shard(small, tmp_path, shard_size):
    source = write_lines(tmp_path / "some.jsonl", TEXTS[:30] if shard_size < 100 else TEXTS)
    [whole], _ = ours(source, tmp_path / "whole", small)
    joined, _ = ours(source, tmp_path / "joined", small, shard_size=shard_size)
    assert joined == [whole]
    shards, _ = ours(source, tmp_path / "shards", small, shard_size=shard_size, prefix_size=1)
    assert len(shards) > 1
    assert b"".join(bin_ for bin_, _ in shards) == whole[0]


@pytest.fixture(scope="module")
def blended(small, directory):
    """Two datasets of weights 1 and 3 and 6:1 in tokens, in many shards each, told apart by their only letter."""
    one = write_lines(directory / "one.jsonl", ["a" * (5 + number) for number in range(240)])
    three = write_lines(directory / "three.jsonl", ["b" * (5 + number) for number in range(80)])
    output = directory / "blended"
    prepare(
        blend_of(one, three, one=1, three=3), output, tokenizer={"model": str(small)},
        holdout={"valid": 0.2, "test": 0.2}, shard_size=3_000, prefix_size=1,
    )  # fmt: skip
    return json.loads((output / "blend.json").read_bytes())


def test_megatron_draws_from_the_blend_by_weight(small, blended):
    tokenizer = reference(small)
    letters = {
        letter: {number for piece, number in tokenizer.get_vocab().items() if set(piece) == {letter}} for letter in "ab"
    }
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=16, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, tokenizer=Identity(700, vocabularies.end_of_document(small)), path_to_cache=None,
        blend_per_split=[get_blend_from_list(blended[split]) for split in ("train", "valid", "test")],
    )  # fmt: skip
    assert len(blended["train"]) > 2 * 5, "each dataset is in several prefixes"
    wanted = [800, 400, 400]
    for built, samples in zip(
        BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build(), wanted, strict=True
    ):
        drawn = Counter(_letter(built[number]["tokens"], letters, config.tokenizer.eod) for number in range(samples))
        assert drawn["a"] == pytest.approx(samples / 4, abs=0.02 * samples)
        assert drawn["a"] + drawn["b"] == samples


def _letter(tokens, letters, eod):
    """Whose tokens a sample is made of."""
    ids = set(np.asarray(tokens).tolist()) - {eod}
    return next((letter for letter, own in letters.items() if ids <= own), None)
