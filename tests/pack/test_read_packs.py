"""The reader of packs that docs/read-packs.md shows: a model's loss on a pack is its loss on the sequences, one by one."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.preparing_sft import NOTHING_HELD_OUT, chat_vocabulary, prepare, write_rows

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/read-packs.md"
ROWS = [{"prompt": "q" * size, "completion": "answer " * size} for size in range(1, 9)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The functions of packs.py, and the folder of packs."""
    folder = tmp_path_factory.mktemp("packs")
    path = write_rows(folder / "chat.jsonl", ROWS)
    vocabulary = {"model": str(chat_vocabulary(folder / "vocabulary"))}
    prepare(
        {"datasets": [{"name": "chat", "path": str(path)}]},
        folder / "out",
        pack_size=200,
        tokenizer=vocabulary,
        holdout=NOTHING_HELD_OUT,
    )
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def rows" in block
    ]
    found = {}
    exec(code, found)
    return found, str(folder / "out/splits/train")


def loss_of(model, row, *names):
    return model(**{name: torch.tensor([row[name]]) for name in ("input_ids", "labels", *names)}, use_cache=False).loss


@torch.inference_mode()
def test_packs_have_the_loss_of_their_sequences(reader):
    found, folder = reader
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, **size))
    packs, sequences = list(found["rows"](folder)), list(found["sequences"](folder))
    assert len(packs) < len(sequences) == len(ROWS)
    trained = [sum(label != -100 for label in row["labels"][1:]) for row in sequences]
    alone = sum(loss_of(model, row) * count for row, count in zip(sequences, trained, strict=True))
    together = sum(loss_of(model, row, "position_ids") * sum(label != -100 for label in row["labels"]) for row in packs)
    assert float(together) == pytest.approx(float(alone), rel=1e-5)


def test_trl_gives_packs_the_same_positions(reader):
    found, folder = reader
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    for row in found["rows"](folder):
        batch = collator([row])
        assert batch["position_ids"].tolist() == [row["position_ids"]]
        assert batch["labels"].tolist() == [row["labels"]]
