"""The SFT flow on a real Prefect server and real Dask workers: the same bytes whatever happens to it on the way."""

import json
import random

import pyarrow.parquet as pq
import pytest
import yaml
from tokenmill.flows.sft import sft_data_prep

from tests.peers.conversations import CLOCK, assistant, call, talk, thinking, tool, user
from tests.preparing import tree
from tests.preparing_sft import CHATML, chat_vocabulary, prepare, write_rows

pytestmark = pytest.mark.slow

PADDING_ROLE = 6
BAD = [b"{broken", b"[]", talk(user("Anyone?")), {"messages": []}]
ROWS, BLANK, DRAFTS = 800, 3, 40


def words(source):
    return " ".join(source.choices(["mill", "grain", "stone", "water", "wheel", "flour", "sack"], k=12))


def chat(source):
    """A conversation with reasoning, or with tools, or with neither."""
    return source.choice([
        talk(user(words(source)), thinking(words(source), words(source)), user("So?"), thinking("Well.", words(source))),
        talk(
            user(words(source)), thinking("Look.", None, call("clock", zone=words(source))), tool("rain"),
            assistant(words(source)), tools=[CLOCK],
        ),
        talk(user(words(source)), assistant(words(source))),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A blend of three datasets in three shapes, with bad rows, blank lines and drafts, and the settings for it."""
    folder, source = tmp_path_factory.mktemp("data"), random.Random(0)
    rows = [{**chat(source), "used_in": ["train"]} for _ in range(ROWS - 350)]
    rows += [{**chat(source), "used_in": ["draft"]} for _ in range(DRAFTS)]
    rows += [{**bad, "used_in": ["train"]} if isinstance(bad, dict) else bad for bad in BAD] + [b""] * BLANK
    source.shuffle(rows)
    turns = [{"conversations": [{"from": "human", "value": words(source)}, {"from": "gpt", "value": words(source)}]} for _ in range(250)]  # fmt: skip
    pairs = [{"prompt": words(source), "response": words(source)} for _ in range(100)]
    sources = [
        {"name": "chat", "path": str(write_rows(folder / "chat.jsonl", rows)), "used_in": "train", "weight": 2.0},
        {"name": "turns", "path": str(write_rows(folder / "turns.jsonl", turns))},
        {"name": "pairs", "path": str(write_rows(folder / "pairs.jsonl", pairs))},
    ]
    (folder / "blend.json").write_text(json.dumps({"datasets": sources}))
    (folder / "chat.jinja").write_text(CHATML)
    settings = {
        "tokenizer": {"model": str(chat_vocabulary(folder / "vocabulary"))}, "chat_template": str(folder / "chat.jinja"),
        "pack_size": 1024, "shard_size": 5_000, "holdout": {"valid": 0.1, "test": 0.0}, "sampling": "down",
    }  # fmt: skip
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


def settings_of(folder):
    return yaml.safe_load((folder / "settings.yaml").read_text())


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """The output of one undisturbed preparation in this process."""
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(str(folder / "blend.json"), out, max_bad_row_fraction=0.001, **settings_of(folder))
    return tree(out)


def run(folder, out, workers):
    """The flow in this process; its final state."""
    settings = settings_of(folder)
    return sft_data_prep(str(folder / "blend.json"), str(out), workers=workers, return_state=True, **settings)


def test_two_workers_make_the_same_bytes_and_record(folder, expected, tmp_path, prefect_api):
    out = tmp_path / "out"
    state = run(folder, out, workers=2)
    assert state.is_completed()
    assert tree(out) == expected
    ((kind, record),) = state.result().items()
    receipts = [json.loads(path.read_bytes()) for path in out.glob("shards/sft/*/receipt.json")]
    dropped = {"malformed_json": 1, "not_an_object": 1, "no_assistant": 1, "no_messages": 1}
    assert kind == record["type"] == "sft"
    assert record["path"] == str(out)
    assert record["shards"] == {"total": len(receipts), "built": len(receipts), "reused": 0}
    assert record["rows"] == ROWS + DRAFTS + len(BAD) + BLANK
    assert record["documents"] == ROWS
    assert record["dropped"] == {**dropped, "filtered": DRAFTS, "blank_line": BLANK}
    assert record["missing"] == 0
    tokens = {split: sum(map(real_tokens, rows_of(out, split))) for split in ("train", "valid")}
    assert {split: part["tokens"] for split, part in record["splits"].items()} == tokens
    assert record["tokens"] == sum(tokens.values())
    assert len(receipts) > 30


def rows_of(out, split):
    """All packs of a split in the store."""
    return [row for name in out.glob(f"shards/packs/*/{split}.parquet") for row in pq.read_table(name).to_pylist()]


def real_tokens(row):
    ends = [*row["role_start"][1:], len(row["input_ids"])]
    runs = zip(row["role_start"], ends, row["role"], strict=True)
    return sum(end - start for start, end, role in runs if role != PADDING_ROLE)
