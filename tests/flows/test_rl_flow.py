"""The RL flow on a real Prefect server and real Dask workers: the same bytes whatever happens to it on the way."""

import json
import random
from itertools import cycle
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from tokenmill.flows.rl import rl_data_prep

from tests.peers.placeholder_fill import fill, read_rows
from tests.preparing_rl import lines_of, prepare, write_rows
from tests.tokenize.small_vocabularies import byte_level_bpe

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "blends/tiny"
STYLES = {"marbles": "dapo", "rectangles": "skywork"}
SELECTED = ["uuid", "agent_ref", "responses_create_params"]
ASKED, PLAIN, BLANK, DRAFTS, MOST_TOKENS = 600, 300, 3, 40, 300


def questions(name, count, *tables):
    """Questions of the tiny blend, those that stand in the row itself or in one of `tables`, as rows of `name`."""
    rows = [json.loads(line) for line in (TINY / "questions.jsonl").read_bytes().splitlines()]
    rows = [row for row in rows if row.get("dataset") in {None, *tables}]
    return [{**row, "uuid": f"{name}-{number}"} for number, row in zip(range(count), cycle(rows), strict=False)]


GOOD = {"asked": questions("asked", ASKED, *STYLES), "plain": questions("plain", PLAIN)}
UNKNOWN = {"uuid": "unknown", "dataset": "cubes", "_hf_placeholder": {"row": 0, "question_template": None}}
LONG = {**GOOD["plain"][0], "responses_create_params": {"input": [{"role": "user", "content": "mill " * 400}]}}
BAD = [b"{broken", b"[]", UNKNOWN, LONG, {**GOOD["plain"][0], "_rowidx": 7}]
DROPPED = {
    "malformed_json": 1, "not_an_object": 1, "unknown_placeholder_table": 1, "oversize": 1, "reserved_field": 1,
    "filtered": DRAFTS, "blank_line": BLANK, "missing_field": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A blend of questions, some out of tables, and of others that the flow's own transform selects fields of, with
    bad rows, blank lines and drafts, and the settings for it.
    """
    folder, shuffle = tmp_path_factory.mktemp("data"), random.Random(0)
    asked = [{**row, "used_in": ["train"]} for row in GOOD["asked"]]
    asked += [{**row, "uuid": f"draft-{row['uuid']}", "used_in": ["draft"]} for row in GOOD["asked"][:DRAFTS]]
    asked += [{**bad, "used_in": ["train"]} if isinstance(bad, dict) else bad for bad in BAD] + [b""] * BLANK
    shuffle.shuffle(asked)
    tables = {name: {"path": str(TINY / f"{name}.parquet"), "style": style} for name, style in STYLES.items()}
    sources = [
        {
            "name": "asked", "path": str(write_rows(folder / "asked.jsonl", asked)), "used_in": "train",
            "transforms": [{"resolve_placeholders": tables}], "weight": 2.0,
        },
        {"name": "plain", "path": str(write_rows(folder / "plain.jsonl", [*GOOD["plain"], {"uuid": "nothing"}]))},
    ]  # fmt: skip
    (folder / "blend.json").write_text(json.dumps({"datasets": sources}))
    settings = {
        "target": "nemo_gym", "max_tokens": MOST_TOKENS, "compression": "zstd", "shard_size": 6_000,
        "holdout": {"valid": 0.1, "test": 0.002},
        "tokenizer": {"model": str(byte_level_bpe(folder / "vocabulary", size=400))},
    }  # fmt: skip
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


def settings_of(folder):
    return {**yaml.safe_load((folder / "settings.yaml").read_text()), "transforms": [{"select": SELECTED}]}


def undisturbed(folder, out):
    """One preparation in this process."""
    return prepare(str(folder / "blend.json"), out, max_bad_row_fraction=0.001, **settings_of(folder))


def run(folder, out, **changed):
    """The flow in this process; its final state."""
    return rl_data_prep(str(folder / "blend.json"), str(out), return_state=True, **{**settings_of(folder), **changed})


def rows_of(path):
    return [json.loads(line) for line in lines_of(path)]


def tokens_of(folder, row):
    vocabulary = Tokenizer.from_file(str(folder / "vocabulary" / "tokenizer.json"))
    texts = [message["content"] for message in row["responses_create_params"]["input"]]
    return sum(len(vocabulary.encode(text, add_special_tokens=False).ids) for text in texts)


def test_every_row_is_published_once_and_recorded(folder, tmp_path, prefect_api):
    """Built by one preparation, published and recorded by a flow that builds nothing."""
    out = tmp_path / "out"
    planned, _ = undisturbed(folder, out)
    ((kind, record),) = run(folder, out).result().items()
    manifest = json.loads((out / "manifest.json").read_bytes())
    rows = {split: rows_of(manifest[name]) for split, name in (("train", "train"), ("valid", "val"), ("test", "test"))}
    found = {row["uuid"]: row for split in rows.values() for row in split}
    tables = {name: read_rows(TINY / f"{name}.parquet") for name in STYLES}
    filled = [fill(row, tables.get(row.get("dataset")), STYLES.get(row.get("dataset"))) for row in GOOD["asked"]]
    assert found == {
        **{row["uuid"]: {**row, "used_in": ["train"]} for row in filled},
        **{row["uuid"]: {name: row[name] for name in SELECTED} for row in GOOD["plain"]},
    }
    assert kind == record["type"] == "rl"
    assert record["path"] == str(out)
    assert record["shards"] == {"total": len(planned.plan.shards), "built": 0, "reused": len(planned.plan.shards)}
    assert len(planned.plan.shards) > 30
    assert record["rows"] == ASKED + PLAIN + sum(DROPPED.values())
    assert record["documents"] == ASKED + PLAIN == sum(map(len, rows.values()))
    assert record["dropped"] == DROPPED
    assert record["missing"] == 0
    books = {split: (len(held), sum(tokens_of(folder, row) for row in held)) for split, held in rows.items()}
    assert {split: (part["documents"], part["tokens"]) for split, part in record["splits"].items()} == books
