"""Add a stage of your own between reading and tokenizing: a function on rows, whose shards have receipts and are reused."""

import json
import re
from dataclasses import replace
from pathlib import Path

from tokenmill.flows.direct import run_preparation
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.kind import Stage, bad_row_policy, run_stage
from tokenmill.tasks.shards.plan import Plan, PlannedShard
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.tokenize.kind import Pretraining
from tokenmill.tasks.tokenize.settings import PretrainSettings

TEXTS = ["Write to miller@mill.example.", "The stones need dressing.", "Or ask baker@bakery.example or the miller."]
VERSION = 1
"""Increase it when the function changes: it is part of the key of every shard."""


def redacted(text: str) -> str:
    """Your function on a row."""
    return re.sub(r"\S+@\S+\w", "<address>", text)


def redact(shard, store, on_bad_row):
    """Build a shard of rows; bad rows are counted and set aside."""
    field = shard.identity["recipe"]["text_field"]
    with building(shard, store, on_bad_row) as builder:
        for _, rows in builder.records([field], lambda batch, index: batch.records[index][field]):
            builder.keep("all", len(rows))
            for text in rows.values():
                builder.open("all.jsonl").write(json.dumps({field: redacted(text)}).encode() + b"\n")
    return builder.receipt


REDACT = Stage("redact-rows", redact, arguments=bad_row_policy)


class RedactedPretraining(Pretraining):
    """Pretraining with one more stage: redact ─► tokenize ─► join."""

    def build(self, planned, build_shards):
        """Redact the rows of every shard, and tokenize those instead."""
        plan, store = planned.plan, Store(planned.plan.store.place, "redacted")
        rows = [replace(shard, identity=identity_of(shard)) for shard in plan.shards]
        force = planned.settings.force
        made = run_stage(
            REDACT, Plan.of(store, rows, rebuild=force), build_shards, REDACT.arguments(planned), rebuild=force
        )
        shards = [reading(shard, item, store) for shard, item in zip(plan.shards, made.finished, strict=True)]
        return super().build(replace(planned, plan=plan.of_other(shards, rebuild=force)), build_shards)


def identity_of(shard: PlannedShard) -> dict:
    """What decides the bytes of redacted rows."""
    recipe = {"text_field": shard.identity["recipe"]["text_field"]}
    return {**shard.identity, "kind": "redacted", "format_version": VERSION, "recipe": recipe}


def reading(shard: PlannedShard, item, store: Store) -> PlannedShard:
    """The shard that tokenizes redacted rows."""
    (file,) = (output for output in item.receipt.outputs if output.path == "all.jsonl")
    source = SourceFile(store.path(item.key, file.path), file.size, "jsonl")
    part = Slice(source, 0, file.size, content=item.key, size=file.size, fields=shard.part.fields)
    return replace(
        shard,
        part=part,
        identity={**shard.identity, "source": {"content": item.key, "format": "jsonl", "compression": None}},
    )


if __name__ == "__main__":
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    kind = RedactedPretraining()
    for _ in range(2):
        settings = PretrainSettings(holdout={"valid": 0, "test": 0})
        blend = kind.read_blend({"datasets": [{"name": "texts", "path": "texts.jsonl"}]})
        record = run_preparation(kind, blend, "out", settings)["pretrain"]
        print(record["documents"], "documents,", record["shards"]["built"], "shards built")
    (path,) = Path("out/shards/redacted").glob("*/all.jsonl")
    print(path.read_text())
