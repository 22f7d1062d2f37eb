"""Whole preparations of scores in this process, without Prefect or Dask, with tiny saved models.

Models that read Harmony have its full vocabulary and nothing else that is large: a token takes a tenth of a millisecond.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.vocabulary import encoding
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.publication import failure_recorded
from transformers import LlamaConfig, LlamaForCausalLM

from tests import preparing_harmony
from tests.building import build_shards, plan_here, publish_here
from tests.preparing_rl import write_rows

HARMONY_VOCABULARY = 201_088
RARE = "zebra"
"""A word that is in one row only."""

KINDS = {"nll": "nll", "embed": "embeddings"}


def plan(what, source, output_dir, **settings):
    """The plan, with slices of a kilobyte or a row group, and whatever else is chosen."""
    return plan_here(KINDS[what], source, output_dir, **{"shard_size": 1_000, **settings})


def prepare(what, source, output_dir, **settings):
    """Plan, score every pending slice in plan order, publish; returns the plan and the manifest."""
    planned = plan(what, source, output_dir, **settings)
    return planned, finish(planned)


def finish(planned):
    """Score what is pending, and publish; the manifest. A failure is recorded as a flow does."""
    kind, store = planned.plan.store.kind, planned.plan.store
    with failure_recorded(planned.output_dir, preparation(kind).header(planned), store.place):
        try:
            build(planned, planned.plan.pending)
        except ValueError as error:
            raise RunError(str(error)) from error
        return publish_here(kind, planned)


def build(planned, shards):
    """Score some of the planned slices, one after the other."""
    return build_shards(planned.plan.store.kind, planned, shards)


def harmony_model(folder, change=lambda model: None):
    """A random model that reads Harmony, after `change`, saved in `folder`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=HARMONY_VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.5,
        )
    )  # fmt: skip
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return str(folder)


def confused_by_the_rare_word(model):
    """Spoil the embedding of the tokens of RARE."""
    model.model.embed_tokens.weight[encoding().encode(f" {RARE}")] = float("nan")


def chat(number, *, split="train"):
    """A conversation with a thought and an answer of some tokens."""
    asked = f"What is {number} times {number}? ({split})"
    thought = "Multiply. " * (number % 4 + 1)
    answer = {"role": "assistant", "content": str(number**2), "reasoning_content": thought}
    return {"messages": [{"role": "user", "content": asked}, answer]}


def normalization(folder, count=60, shard_size=1_500, rare=None):
    """The output folder of a normalization of conversations in two splits; number `rare` of the first has the word."""
    sources = []
    for split in ("easy", "hard"):
        rows = [chat(number, split=split) for number in range(count)]
        if rare is not None and split == "easy":
            rows[rare]["messages"][0]["content"] += f" {RARE}"
        path = write_rows(Path(folder) / f"in/{split}.jsonl", rows)
        sources.append({"name": f"{split}-sums", "path": str(path)})
    preparing_harmony.prepare({"datasets": sources}, Path(folder) / "out", shard_size=shard_size, dedup={"near": False})
    return str(Path(folder) / "out")


def table_of(folder):
    """All rows of a folder of Parquet files, in the order of their names."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet"))])


def rows_of(out):
    """The rows of a normalization."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(Path(out).glob("data/*/*.parquet"))])


def vectors_of(table):
    """The embeddings of a table, float32 [rows, dimensions]."""
    flat = table["embedding"].combine_chunks().flatten().to_numpy()
    return flat.astype(np.float32).reshape(table.num_rows, -1)
