"""Greedy continuations, held against a loop that takes the likeliest token of a whole forward pass each time."""

import json

import numpy as np
import pytest
import torch
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score.nll import Completions
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.train.evaluate import Opening, OpeningSample, generations, given
from transformers import LlamaForCausalLM

from tests.tokenize.small_vocabularies import EOS, byte_level_bpe
from tests.train.small_training import saved_model

torch.set_num_threads(1)

SIZE, ROWS, LONGEST = 400, 512, 64
"""Tokens of the vocabulary, rows of the model's matrices, tokens that it reads."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return find_vocabulary(TokenizerSource(model=str(byte_level_bpe(tmp_path_factory.mktemp("tokenizer"), SIZE))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("writes"), ROWS, LONGEST)


@pytest.fixture
def model(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


def likeliest(model, prompt, count, eos=None):
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :SIZE].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


def opening(ids, continuation=None):
    return Opening("set", np.array(ids, np.int32), None if continuation is None else np.array(continuation, np.int32))


def one(model, vocabulary, start, *, eos=None, new_tokens=12):
    (found,) = generations(model, [start], vocabulary, eos, new_tokens)
    return found


@pytest.mark.parametrize("prompt", [[5], [9, 300, 20, 20], list(range(40, 70))])
def test_each_token_is_the_likeliest(model, vocabulary, prompt):
    wanted = likeliest(model, prompt, 12)
    found = one(model, vocabulary, opening(prompt))
    assert found.text == vocabulary.decode(wanted)
    assert found.prompt == vocabulary.decode(prompt)
    assert found.tokens == 12
    assert found.ended is None


def test_generation_config_is_ignored(folder, model, vocabulary, tmp_path):
    wanted = one(model, vocabulary, opening([9, 300, 20]))
    loud = LlamaForCausalLM.from_pretrained(folder)
    says = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "min_new_tokens": 3, "num_beams": 2}
    loud.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(says))
    loud = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert loud.generation_config.repetition_penalty == 9.0
    assert one(loud, vocabulary, opening([9, 300, 20])) == wanted


def test_ids_beyond_the_vocabulary_are_never_sampled(model, vocabulary):
    with torch.no_grad():
        model.lm_head.weight[SIZE:] *= 100
    prompt = [7, 8, 9]
    with torch.inference_mode():
        assert int(model(torch.tensor([prompt])).logits[0, -1].argmax()) >= SIZE
    assert one(model, vocabulary, opening(prompt)).text == vocabulary.decode(likeliest(model, prompt, 12))


def test_eos_ends_a_continuation(model, vocabulary):
    prompt = [9, 300, 20]
    wanted = likeliest(model, prompt, 12)
    last = next(token for token in wanted[3:] if wanted.index(token) >= 3)
    found = one(model, vocabulary, opening(prompt), eos=last)
    assert (found.ended, found.tokens) == (True, wanted.index(last) + 1)
    assert one(model, vocabulary, opening(prompt), eos=vocabulary.eos).ended is (vocabulary.eos in wanted)


def test_a_loop_is_seen(model, vocabulary):
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = one(model, vocabulary, opening([7, 8, 9]))  # of equals the first is taken, always
    assert found.text == vocabulary.decode([0] * 12)
    assert found.repeated == pytest.approx(8 / 9)
    assert one(model, vocabulary, opening([7]), new_tokens=3).repeated is None


def test_prompts_are_text(vocabulary, tmp_path):
    first, second = given([f"a {EOS} b", "c"], vocabulary)
    assert vocabulary.eos not in first.prompt
    assert vocabulary.decode(first.prompt.tolist()) == f"a {EOS} b"
    assert vocabulary.decode(second.prompt.tolist()) == "c"
    assert first.continuation is None
    with pytest.raises(InputError, match="'' doesn't have tokens"):
        given(["a", ""], vocabulary)
    encoding = find_vocabulary(TokenizerSource(model="cl100k_base"))
    wide = LlamaForCausalLM.from_pretrained(saved_model(tmp_path, 100_352)).eval()
    assert one(wide, encoding, opening([5, 100_261]), new_tokens=1).prompt == "token ids [5, 100261]"


@pytest.mark.slow
def test_tokens_of_the_document_are_counted_at_their_places(model, vocabulary):
    prompt = [9, 300, 20]
    wanted = likeliest(model, prompt, 12)
    half = [token if place % 2 else (token + 1) % SIZE for place, token in enumerate(wanted)]
    assert one(model, vocabulary, opening(prompt, wanted)).matched == 1
    assert one(model, vocabulary, opening(prompt, half)).matched == 0.5
    assert one(model, vocabulary, opening(prompt, wanted[:4])).matched == 1
    assert one(model, vocabulary, opening(prompt, [*wanted, *wanted])).matched == 0.5
    assert one(model, vocabulary, opening(prompt)).matched is None


@pytest.mark.slow
def test_long_prompt_is_cut_at_its_start(model, vocabulary):
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, SIZE, 100)]
    found = one(model, vocabulary, opening(prompt), new_tokens=10)
    assert found.prompt == vocabulary.decode(prompt[-(LONGEST - 10) :])
    assert found.text == vocabulary.decode(likeliest(model, prompt[-(LONGEST - 10) :], 10))
    assert one(model, vocabulary, opening(prompt), new_tokens=1000).tokens == LONGEST - 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_logits_are_an_error(model, vocabulary, value):
    with torch.no_grad():
        model.lm_head.weight[SIZE - 1] = value
    with pytest.raises(RunError, match="logits after 3 tokens are not finite"):
        one(model, vocabulary, opening([7, 8, 9]))


def documents(*pairs):
    """Documents of (length, first scored token or None); ids tell document and place."""
    ids = [1000 * number + place for number, (length, _) in enumerate(pairs) for place in range(length)]
    loss = [first is not None and place >= first for length, first in pairs for place in range(length)]
    offsets = np.cumsum([0, *(length for length, _ in pairs)])
    return Completions(np.array(ids, np.int32), offsets, np.array(loss, np.int8), np.zeros(len(ids), np.int8))


@pytest.mark.parametrize(
    ("prompt_tokens", "given", "expected"),
    [
        (10, ((100, 0), (8, 0), (2, 0), (1, 0), (0, None)), {0: (10, [10, 11, 12, 13, 14]), 1: (4, [1004, 1005, 1006, 1007]), 2: (1, [2001])}),
        (None, ((100, 37), (50, None), (10, 9)), {0: (37, [37, 38, 39, 40, 41]), 2: (9, [2009])}),
    ],
    ids=["the beginning of a document", "all before the first answer"],
)  # fmt: skip
def test_prompts_and_what_follows(prompt_tokens, given, expected):
    openings = OpeningSample("set", 9, prompt_tokens, 5, 0)
    openings.add(documents(*given))
    found = {int(each.prompt[0]) // 1000: (len(each.prompt), each.continuation.tolist()) for each in openings.chosen}
    assert found == expected


def test_the_choice_of_documents_depends_on_the_seed_and_not_on_batches():
    lengths = [(4, 0)] * 60

    def chosen(seed, *borders):
        openings, whole = OpeningSample("set", 5, 2, 2, seed), documents(*lengths)
        for first, stop in zip((0, *borders), (*borders, 60), strict=True):
            tokens = slice(whole.offsets[first], whole.offsets[stop])
            offsets = whole.offsets[first : stop + 1] - whole.offsets[first]
            openings.add(Completions(whole.ids[tokens], offsets, whole.loss[tokens], whole.parts[tokens]))
        return [int(each.prompt[0]) // 1000 for each in openings.chosen]

    assert chosen(1) == chosen(1, 7, 8, 33)
    assert len({*chosen(1)}) == 5
    assert len({document for seed in range(100) for document in chosen(seed)}) > 50
