"""Tables of questions: found and pinned at planning, loaded once and small, row for row what the files hold."""

import json
import os
import sys
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.rl.tables import KEY_SETS, TableFiles, TableSource, find_table, load_table, table_sources
from tokenmill.tasks.sources import parquet_batches
from tokenmill.tasks.sources.opening import SourceCorrupt
from tokenmill.tasks.sources.slices import ContentIndex

from tests.examples import max_examples
from tests.peers.placeholder_fill import read_rows

MESSAGE = pa.struct({"content": pa.string(), "role": pa.string()})
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(MESSAGE),
        "ability": pa.string(),
        "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
        "extra_info": pa.struct({"index": pa.string()}),
    }
)
"""The columns of DAPO-Math-17k."""


def row(question, answer):
    return {
        "data_source": "math",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": "9a9b"},
    }


def write_rows(path, rows, schema=SCHEMA, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema), path, **options)
    return path


def write_pairs(path, pairs, **options):
    return write_rows(path, [row(question, answer) for question, answer in pairs], **options)


def found(path, identity="hash", style="dapo", **fields):
    return find_table(TableSource(path=str(path), style=style, **fields), "some", ContentIndex(), identity)


def pairs_of(table):
    return [table.row(number) for number in range(len(table))]


def refusal(path, **fields):
    with pytest.raises(InputError) as refused:
        found(path, **fields)
    return str(refused.value)


PAIRS = [("What is 1 + 1?", "2"), ("Was ist 語 😀?", '["a"]'), ("What is 1 + 1?", "3"), ("", "")]


def test_a_table_gives_back_question_and_answer_of_every_row_from_file_to_file(tmp_path):
    write_pairs(tmp_path / "b.parquet", PAIRS[2:], row_group_size=1)
    write_pairs(tmp_path / "a.parquet", PAIRS[:2])
    files = found(tmp_path)
    table = load_table(files)
    assert [(part.start, part.stop) for part in files.slices] == [(0, 1), (0, 2)], "a slice, of any row groups"
    assert pairs_of(table) == PAIRS
    assert (table.style, len(table)) == ("dapo", 4)
    assert [table.row(number) for number in (-1, -4, 4, 2**40)] == [None] * 4


texts = st.one_of(st.none(), st.sampled_from(["x", "y", "[1]", ""]), st.text(max_size=8))
messages = st.one_of(st.none(), st.fixed_dictionaries({"content": texts, "role": st.none()}))
rewards = st.one_of(st.none(), st.fixed_dictionaries({"ground_truth": texts, "style": st.none()}))
rows = st.lists(
    st.fixed_dictionaries({"prompt": st.one_of(st.none(), st.lists(messages, max_size=2)), "reward_model": rewards}),
    max_size=30,
)
numbered = count()


def first_content(prompt):
    return prompt[0]["content"] if prompt and prompt[0] else None


@given(rows=rows, batch=st.integers(1, 7), group=st.integers(1, 12), large=st.booleans())
@max_examples(150)
def test_any_rows_are_those_that_pyarrow_reads(tmp_path_factory, rows, batch, group, large):
    path = tmp_path_factory.getbasetemp() / f"any{next(numbered)}.parquet"
    kinds = {"prompt": pa.large_list(MESSAGE) if large else pa.list_(MESSAGE), "reward_model": SCHEMA.field(3).type}
    rows = [*rows, {"prompt": [], "reward_model": None}]
    write_rows(path, rows, pa.schema(kinds), row_group_size=group)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parquet_batches, "MAX_BATCH_ROWS", batch)
        table = load_table(found(path))
    expected = [
        (first_content(each["prompt"]), each["reward_model"] and each["reward_model"]["ground_truth"])
        for each in read_rows(path)
    ]
    assert pairs_of(table) == expected
    path.unlink()


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (pa.int64(), [5, None, -(2**62)]),
        (pa.float64(), [0.5, None, 1e300]),
        (pa.bool_(), [True, False, None]),
        (pa.list_(pa.string()), [["72", "b"], [], None]),
        (pa.list_(pa.int32()), [[1, None], [None], None]),
    ],
    ids=str,
)
def test_answers_that_are_not_text_are_kept_as_json(tmp_path, kind, answers):
    schema = pa.schema({"prompt": pa.list_(MESSAGE), "reward_model": pa.struct({"ground_truth": kind})})
    rows = [{"prompt": [{"content": "q"}], "reward_model": {"ground_truth": answer}} for answer in answers]
    table = load_table(found(write_rows(tmp_path / "a.parquet", rows, schema)))
    assert [answer and json.loads(answer) for _, answer in pairs_of(table)] == answers


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_may_be_of_any_kind(tmp_path, kind):
    prompts = pa.array([[{"content": "a"}], [{"content": "b"}, {"content": "c"}], [{"content": "a"}]])
    content = pa.array(["a", "b", "c", "a"]).cast(kind)
    prompts = pa.ListArray.from_arrays(prompts.offsets, pa.StructArray.from_arrays([content], ["content"]))
    answers = pa.StructArray.from_arrays([pa.array(["1", "2", "1"]).cast(kind)], ["ground_truth"])
    pq.write_table(pa.table({"prompt": prompts, "reward_model": answers}), tmp_path / "a.parquet")
    assert pairs_of(load_table(found(tmp_path / "a.parquet"))) == [("a", "1"), ("b", "2"), ("a", "1")]


def held(column):
    return sum(map(sys.getsizeof, column.texts)) + sys.getsizeof(column.texts) + column.numbers.nbytes


def test_repeated_texts_are_stored_once(tmp_path):
    distinct = [(f"{number} " + "question " * 50, str(number)) for number in range(300)]
    write_pairs(tmp_path / "a.parquet", distinct * 100, row_group_size=700)
    table = load_table(found(tmp_path / "a.parquet"))
    texts = sum(len(question) for question, _ in distinct * 100)
    assert len(table) == 30_000
    assert [table.row(number) for number in (0, 299, 300, 29_999)] == [distinct[place] for place in (0, 299, 0, 299)]
    # Two numbers of four bytes a row, and each of 300 texts once.
    assert held(table.questions) + held(table.answers) < 30_000 * 8 + 300 * 700 < texts / 20


def test_the_files_of_a_table_travel_as_json_and_are_loaded_once_in_a_process(tmp_path):
    write_pairs(tmp_path / "a.parquet", PAIRS)
    write_pairs(tmp_path / "b.parquet", PAIRS)
    for identity in ("hash", "mtime"):
        files = found(tmp_path, identity, "skywork")
        travelled = TableFiles.from_record(json.loads(json.dumps(files.record())))
        assert travelled == files
        assert load_table(travelled) is load_table(files)


def test_content_covers_exactly_the_read_columns(tmp_path):
    path = write_pairs(tmp_path / "a.parquet", PAIRS)
    before = found(path).contents
    os.utime(path, ns=(1, 1))
    assert found(path).contents == before
    moved = path.rename(tmp_path / "moved.parquet")
    assert found(moved).contents == before
    write_rows(moved, [{**row(*pair), "ability": "OTHER"} for pair in PAIRS])
    assert found(moved).contents == before
    for pairs in ([*PAIRS[:3], ("", "5")], [*PAIRS[:3], ("?", "")], PAIRS[:3]):
        assert found(write_pairs(moved, pairs)).contents != before


def disguised(path):
    """Other content of the same size and time."""
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(path.read_bytes().replace(b"What is", b"That is"))
    os.utime(path, ns=times)


CHANGES = {
    "more rows": (lambda path: write_pairs(path, [*PAIRS, *PAIRS]), "changed"),
    "another of its size and time": (disguised, "changed"),
    "gone": (Path.unlink, "gone since the plan; put it back"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_file_changed_after_planning_is_rejected(tmp_path, what):
    path = write_pairs(tmp_path / "a.parquet", PAIRS, use_dictionary=False, compression="none")
    files, (change, words) = found(path), CHANGES[what]
    change(path)
    with pytest.raises(RunError, match=rf"a\.parquet: {words}"):
        load_table(files)


def test_non_utf8_texts_are_null(tmp_path):
    content = pa.array([b"\xff\xfe"]).view(pa.string())
    prompts = pa.ListArray.from_arrays([0, 1], pa.StructArray.from_arrays([content], ["content"]))
    answers = pa.StructArray.from_arrays([pa.array(["1"])], ["ground_truth"])
    pq.write_table(pa.table({"prompt": prompts, "reward_model": answers}), tmp_path / "a.parquet")
    files = found(tmp_path / "a.parquet")
    with pytest.raises(SourceCorrupt, match="not UTF-8"):
        load_table(files)


def test_non_tables_are_rejected_with_a_remedy(tmp_path):
    write_pairs(tmp_path / "dapo-math.parquet", PAIRS)
    said = refusal(tmp_path / "dapo_math.parquet")
    assert said.startswith("table 'some': ")
    assert f"did you mean {tmp_path / 'dapo-math.parquet'}?" in said
    assert "'revision' 'main' applies to hf:// paths only" in refusal(tmp_path, revision="main")
    assert "doesn't contain rows" in refusal(write_pairs(tmp_path / "a.parquet", []))
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.jsonl").write_text(json.dumps(row("q", "a")))
    assert "must be Parquet; convert it" in refusal(tmp_path / "lines")


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema({"question": pa.string(), "answer": pa.string()}),
        pa.schema({"prompt": pa.list_(MESSAGE)}),
        pa.schema({"reward_model": SCHEMA.field(3).type}),
        pa.schema({"prompt": pa.string(), "reward_model": SCHEMA.field(3).type}),
        pa.schema({"prompt": pa.list_(pa.string()), "reward_model": SCHEMA.field(3).type}),
        pa.schema({"prompt": pa.list_(pa.struct({"content": pa.binary()})), "reward_model": SCHEMA.field(3).type}),
        pa.schema({"prompt": pa.list_(pa.struct({"text": pa.string()})), "reward_model": SCHEMA.field(3).type}),
        pa.schema({"prompt": pa.list_(MESSAGE), "reward_model": pa.string()}),
        pa.schema({"prompt": pa.list_(MESSAGE), "reward_model": pa.struct({"style": pa.string()})}),
        pa.schema({"prompt": pa.list_(MESSAGE), "reward_model": pa.struct({"ground_truth": pa.date32()})}),
        pa.schema({"prompt": pa.list_(MESSAGE), "reward_model": pa.struct({"ground_truth": MESSAGE})}),
    ],
    ids=lambda schema: " ".join(str(schema).split()),
)
def test_file_with_a_different_shape_is_not_a_question_table(tmp_path, schema):
    write_rows(tmp_path / "a.parquet", [dict.fromkeys(schema.names)], schema)
    said = refusal(tmp_path / "a.parquet")
    assert "not a question table" in said
    assert f"({schema.names[0]}: " in said


def commit(hub, folder, repository, name, pairs):
    path = folder / repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_pairs(path, pairs)
    return hub.dataset(repository).commit(folder / repository)


def test_a_table_of_the_hub_is_read_from_the_commit_it_was_planned_at(hub, tmp_path):
    commit(hub, tmp_path, "org/name", "data/code-00000-of-00001.parquet", PAIRS[:1])
    first = commit(hub, tmp_path, "org/name", "data/math-00000-of-00001.parquet", PAIRS)
    files = found("hf://org/name", split="math")
    assert [part.file.uri for part in files.slices] == [
        f"hf://datasets/org/name@{first}/data/math-00000-of-00001.parquet"
    ]
    assert "has no split 'maths'" in refusal("hf://org/name", split="maths")
    assert "'math'" in refusal("hf://org/name", split="maths")
    second = commit(hub, tmp_path, "org/name", "data/math-00000-of-00001.parquet", PAIRS[2:])
    assert pairs_of(load_table(files)) == PAIRS
    assert found("hf://org/name", split="math", revision=first) == files
    assert pairs_of(load_table(found("hf://org/name", split="math", revision=second))) == PAIRS[2:]


@pytest.mark.parametrize("name", KEY_SETS)
def test_the_published_sets_have_one_table_of_each_style_and_find_it_in_repositories_like_the_public_ones(
    hub, tmp_path, name
):
    dapo = commit(hub, tmp_path, "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet", PAIRS[:1])
    for split in ("code", "math"):
        file = f"data/{split}-00000-of-00001.parquet"
        skywork = commit(hub, tmp_path, "Skywork/Skywork-OR1-RL-Data", file, PAIRS)
    sources = table_sources(name)
    assert sorted(source.style for source in sources.values()) == ["dapo", "skywork"]
    assert all(len(source.revision) == 40 for source in sources.values())
    ends = {"dapo": f"{dapo}/data/dapo-math-17k.parquet", "skywork": f"{skywork}/data/math-00000-of-00001.parquet"}
    for source in sources.values():
        # The stand-in makes commits of its own, so the latest one stands in for the pinned one.
        (part,) = find_table(source.model_copy(update={"revision": None}), "some", ContentIndex(), "content").slices
        assert part.file.uri.endswith(f"@{ends[source.style]}")


def test_custom_tables_are_an_object_and_key_sets_unchanged():
    asked = {"_why": "a comment", "org/a b": {"path": "a.parquet", "style": "skywork", "_note": 1}}
    assert table_sources(asked) == {"org/a b": TableSource(path="a.parquet", style="skywork")}
    table_sources("nano3").clear()
    assert len(table_sources("nano3")) == 2


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("nano", "did you mean 'nano3'?"),
        ("", "known: lightning35, nano3, super3, ultra3"),
        (None, "None doesn't name tables; write 'nano3' or 'super3' or 'ultra3' or 'lightning35'"),
        (True, "doesn't name tables"),
        (["nano3"], "doesn't name tables"),
        ({}, "doesn't name tables"),
        ({"_only": "a comment"}, "doesn't name tables"),
        ({"a": "b.parquet"}, "table 'a': "),
        ({"a": {"path": "b.parquet"}}, "table 'a': style: missing"),
        ({"a": {"style": "dapo"}}, "table 'a': path: missing"),
        ({"a": {"path": "", "style": "dapo"}}, "table 'a': path: "),
        ({"a": {"path": "b", "style": "daop"}}, "'dapo' or 'skywork' (got 'daop')"),
        ({"a": {"path": "b", "style": "dapo", "splt": "c"}}, "table 'a': splt: unknown key; did you mean 'split'?"),
    ],
)
def test_argument_without_tables_is_rejected_with_a_remedy(argument, said):
    with pytest.raises(InputError) as refused:
        table_sources(argument)
    assert said in str(refused.value)
    assert str(refused.value).startswith("resolve_placeholders: ")
