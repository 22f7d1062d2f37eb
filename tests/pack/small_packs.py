"""Packed Parquet files and proven shards of them, written from lists alone; and published packs, read without the project."""

import io
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.pack.parquet import PARQUET
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount, shard_key
from tokenmill.tasks.sources.files import Slice, SourceFile

PACK_SIZE, MULTIPLE = 64, 4
USER, ASSISTANT, PADDING = 2, 4, 6
METADATA = {b"tokenmill": b'{"format": "packed-sft", "version": 1}'}
KINDS = {
    "input_ids": pa.int32(), "loss_mask": pa.int8(), "seq_start_id": pa.int32(), "document": pa.int64(),
    "role_start": pa.int32(), "role": pa.int8(),
}  # fmt: skip
SCHEMA = pa.schema(
    [pa.field(name, pa.list_(pa.field("element", KINDS[name], nullable=False)), nullable=False) for name in KINDS],
    METADATA,
)


def sequence(tokens, numbers):
    """The roles of a sequence, token by token: a question, an answer, and padding to a multiple and one."""
    roles = [USER] * numbers.randint(0, tokens) + [ASSISTANT] * tokens
    return roles[-tokens:] + [PADDING] * (-(tokens - 1) % MULTIPLE)


def packs(count, seed=0):
    """So many packs, each a list of sequences, each the roles of its tokens."""
    numbers, made = random.Random(seed), []
    while len(made) < count:
        room, sequences = PACK_SIZE, []
        while room > 30 or not sequences:
            sequences.append(sequence(numbers.randint(1, room - MULTIPLE), numbers))
            room -= len(sequences[-1])
        made.append(sequences)
    return made


def row(sequences, first_id):
    """A pack as a row of the file; its ids count on from `first_id`, so that every pack is told from the others."""
    roles = [role for each in sequences for role in each]
    starts = list(itertools.accumulate(map(len, sequences), initial=0))[:-1]
    changes = [at for at in range(len(roles)) if at in starts or roles[at] != roles[at - 1]]
    return {
        "input_ids": list(range(first_id, first_id + len(roles))),
        "loss_mask": [int(role == ASSISTANT) for role in roles],
        "seq_start_id": starts,
        "document": list(range(len(starts))),
        "role_start": changes,
        "role": [roles[at] for at in changes],
    }


def parquet(made, first_id=0):
    rows = [row(sequences, first_id + PACK_SIZE * number) for number, sequences in enumerate(made)]
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), stream, row_group_size=300, **PARQUET)
    return stream.getvalue()


def tokens_of(made):
    return sum(role != PADDING for sequences in made for each in sequences for role in each)


def facts_of(made):
    """What a receipt says of some packs."""
    tokens, stored = tokens_of(made), [sum(map(len, sequences)) for sequences in made]
    return {
        "sequences": sum(map(len, made)),
        "packs": len(made),
        "tokens": tokens,
        "padding": sum(stored) - tokens,
        "loss_tokens": sum(role == ASSISTANT for sequences in made for each in sequences for role in each),
        "longest": max(len(each) for sequences in made for each in sequences),
        "most_sequences": max(map(len, made)),
        "shortest_pack": min(stored),
    }


def shard(store, dataset, number, parts, split="datasets", content=None):
    """A group of packs for each of its parts, built and proven; equal `content` makes equal keys."""
    content = content or f"{dataset}/{number}"
    identity = {"kind": "packs", "format_version": 1, "recipe": {}, "source": {"sequences": [content]}}
    key = shard_key(identity)
    outputs = [
        publish_bytes(store.path(key, f"{part}.parquet"), parquet(made, first_id=int(key[:6], 16)))
        for part, made in parts.items()
    ]
    receipt = store.issue(
        identity,
        outputs=outputs,
        rows_in=sum(map(len, parts.values())),
        parts={part: PartCount(len(made), tokens_of(made)) for part, made in parts.items()},
        drops={},
        facts={"oversize": 0, **{part: facts_of(made) for part, made in parts.items() if made}},
    )
    part = Slice(SourceFile(f"/{dataset}.jsonl", 10, "jsonl"), number, number + 1)
    return Finished(PlannedShard(dataset, split, part, identity), key, receipt)


@dataclass(frozen=True)
class Stored:
    """A sequence as it lies in a pack, with the role of each of its tokens."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    document: int
    roles: tuple[int, ...]

    @property
    def learnable(self):
        return self.ids, self.mask


def files_of(out, split="train"):
    return sorted(Path(out).glob(f"splits/{split}/*.parquet"))


def packs_of(out, split="train"):
    """The published packs of a split, read by pyarrow alone: each a list of its sequences."""
    return [_sequences(row) for path in files_of(out, split) for row in pq.read_table(path).to_pylist()]


def _sequences(row):
    ends = [*row["seq_start_id"][1:], len(row["input_ids"])]
    runs = np.diff([*row["role_start"], len(row["input_ids"])])
    roles = np.repeat(row["role"], runs).tolist()
    assert len(row["document"]) == len(ends)
    assert set(row["seq_start_id"]) <= set(row["role_start"])
    return [
        Stored(tuple(row["input_ids"][a:b]), tuple(row["loss_mask"][a:b]), document, tuple(roles[a:b]))
        for a, b, document in zip(row["seq_start_id"], ends, row["document"], strict=True)
    ]


def sequences_of(out, split="train"):
    return list(itertools.chain(*packs_of(out, split)))
