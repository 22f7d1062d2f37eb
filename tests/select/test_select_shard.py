"""Pools and candidates of a whole normalization, held against the published rows read one by one in Python."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.report.cards import card
from tokenmill.tasks.report.measured import measured
from tokenmill.tasks.select.settings import SelectionChoices
from tokenmill.tasks.select.shard import require_selectable
from xxhash import xxh3_128_hexdigest

from tests.building import plan_here
from tests.dedup.test_harmony_duplicates import built_by, copy, data_set, rows_of, talk, talks
from tests.harmony import rows as sources
from tests.preparing_harmony import prepare
from tests.preparing_rl import write_rows

BASE = 'dedup_outcome is null or dedup_outcome == "kept"'
POOLS = {
    "rated.v2": ("meta_correctness is not null", lambda row: row["meta_correctness"] is not None),
    "tools": ("quality_has_tool", lambda row: row["quality_has_tool"]),
    "long": ("stats_token_len >= 120", lambda row: row["stats_token_len"] >= 120),
    "nobody": ('dataset == "nobody"', lambda row: False),
    "short": ("stats_token_len < 200", lambda row: row["stats_token_len"] < 200),
}


def write_pools(path, pools, base=(BASE,)):
    """A file of pools; `pools` are predicates by name."""
    written = [{"name": name, "description": name, "predicate": predicate} for name, predicate in pools.items()]
    path.write_text(yaml.safe_dump({"base": list(base), "pools": written}))
    return str(path)


def predicates():
    return {name: predicate for name, (predicate, _) in POOLS.items()}


def mixed(folder):
    """A blend of several shards and splits, with tools, rates and duplicates."""
    own = talks(1, [f"t{number}" for number in range(8)])
    short = [talk(f"s{number}", f"Is {number} even?", "Yes." if number % 2 else "No.") for number in range(8)]
    copies = [copy(own["t0"], "t0=1"), copy(own["t1"], "t1~1", 1)]
    write_rows(folder / "chat/train.jsonl", [*own.values(), *copies, b"{broken", *short])
    write_rows(folder / "chat/validation.jsonl", [copy(own["t2"], "t2=1"), talk("v0", "Is it so?", "It is.")])
    write_rows(folder / "math/high.jsonl", [sources.MATH, {**sources.MATH_PLAIN, "uuid": "u-9"}])
    write_rows(folder / "agents/tool_calling.jsonl", [sources.AGENTIC])
    converters = {"math": "math_v2", "agents": "agentic"}
    names = ("chat", "math", "agents")
    return {"datasets": [data_set(n, folder / n) | {"converter": converters.get(n, "openai_messages")} for n in names]}


@pytest.fixture(scope="module", params=[False, True], ids=["lists", "copies"])
def selected(tmp_path_factory, request):
    """A normalization with the pools above, as lists or as copies: its folder and its manifest."""
    folder = tmp_path_factory.mktemp("selected")
    choices = {"pools": write_pools(folder / "pools.yaml", predicates()), "materialize": request.param}
    _, manifest = prepare(mixed(folder / "in"), folder / "out", shard_size=6000, selection=choices)
    assert len(manifest["derived"]["shards"]) > 4
    return folder / "out", manifest


def folder_of(out, name):
    """The rows of a published folder, by their ids; none where there is no folder."""
    tables = [pq.read_table(path) for path in sorted((Path(out) / name).glob("*.parquet"))]
    found = {row["row_id"]: row for table in tables for row in table.to_pylist()}
    assert len(found) == sum(map(len, tables))
    return found


def listed(rows):
    """Rows by their ids, as a list of a pool has them."""
    return {row_id: {"row_id": row_id, "source_row": row["source_row"]} for row_id, row in rows.items()}


def expected_pools(rows):
    """The rows of each pool, by their ids, found one row at a time."""
    stays = [row for row in rows if row["dedup_outcome"] == "kept"]
    return {name: {row["row_id"]: row for row in stays if takes(row)} for name, (_, takes) in POOLS.items()}


def test_a_pool_holds_the_published_rows_that_its_predicate_takes(selected):
    out, manifest = selected
    rows = rows_of(out)
    assert sum(row["dedup_outcome"] != "kept" for row in rows) == 3
    expected = expected_pools(rows)
    copies = manifest["settings"]["selection"]["materialize"]
    assert {name: folder_of(out, f"pools/{name}") for name in POOLS} == {
        name: of if copies else listed(of) for name, of in expected.items()
    }
    assert {name for name, of in expected.items() if of} == {path.name for path in (out / "pools").iterdir()}
    assert all(0 < len(of) < len(rows) for name, of in expected.items() if name != "nobody")
    for file in (out / "pools").rglob("*.parquet"):
        assert pq.read_schema(file).names == (ROWS.names if copies else ["row_id", "source_row"])


def test_the_books_of_the_pools_are_what_their_files_hold(selected):
    out, manifest = selected
    told = json.loads((out / "pools.json").read_bytes())
    rows = rows_of(out)
    expected = expected_pools(rows)
    stays = {row["row_id"] for row in rows if row["dedup_outcome"] == "kept"}
    assert (told["rows"], told["base"]) == (len(rows), [BASE])
    assert told["base_rows"] == len(stays)
    assert told["rows_in_no_pool"] == len(stays.difference(*expected.values()))
    for name, of in expected.items():
        pool = told["pools"][name]
        assert pool["predicate"] == POOLS[name][0]
        assert (pool["rows"], pool["rows_without_tokens"]) == (len(of), 0)
        assert pool["tokens"] == sum(row["stats_token_len"] for row in of.values())
        assert manifest["selection"]["pools"][name] == {"rows": len(of), "tokens": pool["tokens"]}
    keys = [entry["key"] for entry in manifest["shards"] if entry["documents"]]
    digests = {key: xxh3_128_hexdigest((out / f"shards/harmony/{key}/all.parquet").read_bytes()) for key in keys}
    digest = hashlib.sha256(json.dumps(digests, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert told["inputs"] == {"files": len(keys), "sha256": digest}
    assert told["overlap"] == {
        one: {other: len(of.keys() & others.keys()) for other, others in expected.items()}
        for one, of in expected.items()
    }
    assert any(told["overlap"]["long"][name] for name in ("tools", "rated.v2"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("pretrain", {}), ("sft", {"chat_template": "harmony", "tokenizer": {"model": "o200k_harmony"}})],
)
def test_row_lists_locate_their_rows(selected, kind, settings):
    out, manifest = selected
    if not manifest["settings"]["selection"]["materialize"]:
        blend = {"datasets": [{"name": "pool", "path": str(out / "pools/tools")}]}
        with pytest.raises(InputError, match=r"lists the rows of a pool; .* selection\.materialize=true"):
            plan_here(kind, blend, out.parent / "planned", **settings)


def test_unique_gives_each_row_to_the_first_pool_that_takes_it(tmp_path):
    choices = {"pools": write_pools(tmp_path / "pools.yaml", predicates()), "unique": True}
    prepare(mixed(tmp_path / "in"), tmp_path / "out", shard_size=6000, selection=choices)
    taken, shared = set(), 0
    expected = expected_pools(rows_of(tmp_path / "out"))
    told = json.loads((tmp_path / "out/pools.json").read_bytes())
    for name, of in expected.items():
        found = folder_of(tmp_path / "out", f"pools/{name}")
        assert found == listed({row_id: row for row_id, row in of.items() if row_id not in taken})
        assert told["pools"][name]["rows"] == len(found)
        assert told["overlap"][name][name] == len(of)
        shared += len(of.keys() & taken)
        taken |= of.keys()
    assert shared > 0


def spoken(messages, role):
    return [message["content"].strip() for message in messages if message["role"] == role]


def test_candidates_show_what_users_ask_and_carry_the_columns_of_their_rows(selected):
    out, manifest = selected
    rows = {row["row_id"]: row for row in rows_of(out)}
    found = folder_of(out, "candidates")
    assert found.keys() == {name for name, row in rows.items() if row["dedup_outcome"] == "kept"}
    questions = {row["uuid"]: "\n\n".join(spoken(row["messages"], "user")) for row in originals(out.parent / "in")}
    for row_id, candidate in found.items():
        row = rows[row_id]
        assert candidate["embed_text"] == questions[row["source_uuid"]]
        assert candidate["stats_embed_word_count"] == len(candidate["embed_text"].split())
        for name in ("id", "dataset", "split", "meta_domain", "meta_correctness", "quality_has_tool", "loss_mode"):
            assert candidate[name] == row[name]
    assert manifest["selection"]["candidates"] == len(found)


def originals(folder):
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines if not line.startswith(b"{broken")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "reason", "wanted"),
    [
        ({}, "not_required", lambda row: row["dedup_outcome"] == "kept"),
        ({"require": "quality_has_tool"}, "not_required", lambda row: row["quality_has_tool"]),
        ({"require": 'dataset == "nobody"'}, "not_required", lambda row: False),
        ({"view": "reasoning_excerpt", "require": "text is not null"}, None, lambda row: True),
        ({"view": "none"}, "no_view", lambda row: False),
    ],
)
def test_every_row_is_a_candidate_or_dropped_for_a_reason(tmp_path, choices, reason, wanted):
    _, manifest = prepare(mixed(tmp_path / "in"), tmp_path / "out", shard_size=6000, selection=choices)
    drops = Counter()
    for entry in manifest["derived"]["shards"]:
        drops.update(entry["drops"])
        assert entry["rows"] == entry["documents"].get("candidates", 0) + sum(entry["drops"].values())
    rows, found = rows_of(tmp_path / "out"), folder_of(tmp_path / "out", "candidates")
    assert found.keys() == {row["row_id"] for row in rows if wanted(row)}
    assert drops == ({reason: len(rows) - len(found)} if reason else {})
    surveyed = [row for row in rows if row["dedup_outcome"] == "kept"] if choices == {"view": "none"} else found
    assert json.loads((tmp_path / "out/behaviours.json").read_bytes())["rows"] == len(surveyed)
    assert (tmp_path / "out/candidates").exists() == bool(found)
    assert ("candidates/*.parquet" in card(measured(str(tmp_path / "out")))) == bool(found)


def test_a_sample_of_the_rows_that_are_wanted_is_surveyed_where_there_are_many(tmp_path, monkeypatch):
    rows = [talk(str(number), f"What is {number} squared?", str(number**2)) for number in range(400)]
    blend, found = {"datasets": [data_set("a", write_rows(tmp_path / "a.jsonl", rows))]}, {}
    for most in (400, 399, 100):
        monkeypatch.setattr("tokenmill.tasks.select.shard.SURVEYED_ROWS", most)
        prepare(blend, tmp_path / "out", selection={"pools": "none", "share": 0.1})
        found[most] = json.loads((tmp_path / "out/behaviours.json").read_bytes())["rows"]
    assert found[400] == 400
    assert 160 <= found[399] <= 240
    assert 75 <= found[100] <= 125


def test_new_pools_or_view_rebuild_only_the_selection(tmp_path):
    blend, pools = mixed(tmp_path / "in"), tmp_path / "pools.yaml"
    write_pools(pools, predicates())
    chosen = {"shard_size": 6000, "selection": {"pools": str(pools)}}
    built_by(blend, tmp_path / "out", **chosen)
    before = published_names(tmp_path / "out", "data")
    for predicate in ("quality_has_tool or dataset == 'chat'", "quality_has_tool"):
        write_pools(pools, {**predicates(), "tools": predicate})
        built = built_by(blend, tmp_path / "out", **chosen)
        expected = {"select-rows"} if "or" in predicate else set()
        assert {task for task, _ in built} == expected
    write_pools(pools, predicates())
    pools.write_text(pools.read_text().replace("description: tools", "description: With tools"))
    assert built_by(blend, tmp_path / "out", **chosen) == {}
    assert "With tools" in (tmp_path / "out/pools.json").read_text()
    chosen["selection"]["view"] = "behavior"
    assert {task for task, _ in built_by(blend, tmp_path / "out", **chosen)} == {"select-rows"}
    assert all(row["embed_text"].startswith("TOOL_SEQ:") for row in folder_of(tmp_path / "out", "candidates").values())
    assert published_names(tmp_path / "out", "data") == before


def published_names(out, folder):
    return {path: path.stat().st_ino for path in (out / folder).rglob("*.parquet")}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"require": "no_such_column == 1"}, "no_such_column"),
        ({"require": "text == 1"}, "text"),
        ({"require": "and"}, "selection.require"),
        ({"pools": "/nowhere/pools.yaml"}, "no such file; check the path of the pools"),
        ({"pools": {"a": "stats_tokens > 3"}}, "stats_tokens"),
    ],
)
def test_meaningless_selection_is_rejected(tmp_path, choices, words):
    if isinstance(choices.get("pools"), dict):
        choices = {"pools": write_pools(tmp_path / "pools.yaml", choices["pools"])}
    with pytest.raises(InputError, match=words):
        require_selectable(SelectionChoices(**choices))
