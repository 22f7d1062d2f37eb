"""Verification of packs: a file that is none is told apart by the rule it breaks, and a damaged one is built again."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.pack.packs import inspect_sft_shard
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify

from tests.kinds.preparations import sample
from tests.preparing import tree
from tests.preparing_sft import pack_receipts

PACK_SIZE = 12
TYPES = {
    "input_ids": pa.int32(), "loss_mask": pa.int8(), "seq_start_id": pa.int32(),
    "document": pa.int64(), "role_start": pa.int32(), "role": pa.int8(),
}  # fmt: skip
PACKS = [
    {"input_ids": [5, 6, 7, 8, 5, 6, 7], "loss_mask": [0, 1, 1, 0, 0, 1, 0], "seq_start_id": [0, 4], "document": [0, 2], "role_start": [0, 2, 4, 6], "role": [3, 4, 3, 4]},
    {"input_ids": [9] * 12, "loss_mask": [0] * 6 + [1] * 5 + [0], "seq_start_id": [0], "document": [1], "role_start": [0, 6], "role": [3, 4]},
]  # fmt: skip
"""Two packs of three sequences; the second is full."""
FACTS = {"packs": 2, "sequences": 3, "tokens": 18, "padding": 1, "loss_tokens": 8}
"""What a receipt says of them, one stored token being padding."""


def table(packs, types=TYPES, *, nullable=False):
    fields = [(name, pa.field("element", kind, nullable=nullable)) for name, kind in types.items()]
    schema = pa.schema([pa.field(name, pa.list_(element), nullable=nullable) for name, element in fields])
    return pa.Table.from_pylist([{name: pack[name] for name in types} for pack in packs], schema)


def proven(folder, *tables, facts=FACTS):
    """A store, and the receipt of packs whose one file holds these row groups, made of a shard of three conversations."""
    store = Store(str(folder / "store"), "packs")
    identity = {"kind": "sft", "format_version": 1, "recipe": {}, "source": {"content": "some"}}
    member = Store(store.place, "sft").issue(identity, outputs=[], rows_in=3, parts={"all": PartCount(3, 18)}, drops={})
    source = {"sequences": [f"{member.key}/all"]}
    identity = {"kind": "packs", "format_version": 1, "recipe": {"pack_size": PACK_SIZE}, "source": source}
    stream = pa.BufferOutputStream()
    with pq.ParquetWriter(stream, tables[0].schema) as writer:
        for each in tables:
            writer.write_table(each)
    receipt = store.issue(identity, outputs=[], rows_in=3, parts={"all": PartCount(3, 18)}, drops={}, facts={"all": facts})  # fmt: skip
    publish_bytes(store.path(receipt.key, "all.parquet"), stream.getvalue().to_pybytes())
    return store, receipt


def problems(folder, *tables, **changed):
    store, receipt = proven(folder, *tables, **changed)
    place = store.path(receipt.key, "all.parquet")
    found = inspect_sft_shard(store, receipt)
    assert all(problem.startswith(f"{place}: ") for problem in found)
    return [problem.removeprefix(f"{place}: ") for problem in found]


def test_all_packs_are_inspected(tmp_path):
    many = PACKS * 150
    facts = {name: count * 150 for name, count in FACTS.items()}
    assert problems(tmp_path / "good", table(many), facts=facts) == []
    assert problems(tmp_path / "groups", table(PACKS[:1]), table(PACKS[1:])) == []
    for number in random.Random(0).sample(range(300), 20):
        wrong = [*many[:number], {**many[number], "seq_start_id": [1]}, *many[number + 1 :]]
        assert problems(tmp_path / str(number), table(wrong), facts=facts) == [
            "seq_start_id of a pack does not begin with 0"
        ]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"loss_mask": [0, 1, 0]}, "loss_mask and input_ids of a pack differ in length"),
        ({"loss_mask": []}, "loss_mask and input_ids of a pack differ in length"),
        ({"input_ids": [9] * 13, "loss_mask": [0] * 13}, "a pack holds 13 tokens, more than pack_size 12"),
        ({"seq_start_id": []}, "seq_start_id of a pack does not begin with 0"),
        ({"seq_start_id": [1]}, "seq_start_id of a pack does not begin with 0"),
        ({"seq_start_id": [-1]}, "seq_start_id of a pack does not begin with 0"),
        ({"input_ids": [], "loss_mask": [], "seq_start_id": []}, "seq_start_id of a pack does not begin with 0"),
        ({"input_ids": [], "loss_mask": []}, "seq_start_id of a pack does not increase, or exceeds its tokens"),
        ({"seq_start_id": [0, 0]}, "seq_start_id of a pack does not increase, or exceeds its tokens"),
        ({"seq_start_id": [0, 5, 4]}, "seq_start_id of a pack does not increase, or exceeds its tokens"),
        ({"seq_start_id": [0, -3]}, "seq_start_id of a pack does not increase, or exceeds its tokens"),
        ({"seq_start_id": [0, 12]}, "seq_start_id of a pack does not increase, or exceeds its tokens"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "seq_start_id": [0]}, "loss_mask is 1 at the last token of a sequence"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0], "seq_start_id": [0, 2]}, "loss_mask is 1 at the last token of a sequence"),
    ],
    ids=str,
)  # fmt: skip
def test_a_broken_rule_is_named(tmp_path, which, change, problem):
    packs = [{**pack, **change} if number == which else pack for number, pack in enumerate(PACKS)]
    assert problems(tmp_path, table(packs)) == [problem]


@pytest.mark.parametrize(
    ("packs", "found"),
    [
        (PACKS[:1], {"packs": 1, "sequences": 2, "stored": 7, "loss_tokens": 3}),
        ([PACKS[0], {**PACKS[1], "seq_start_id": [0, 3]}], {"packs": 2, "sequences": 4, "stored": 19, "loss_tokens": 8}),
        ([PACKS[0], {**PACKS[1], "loss_mask": [0] * 12}], {"packs": 2, "sequences": 3, "stored": 19, "loss_tokens": 3}),
        ([PACKS[0], {**PACKS[1], "input_ids": [9] * 11, "loss_mask": [0] * 6 + [1] * 4 + [0]}], {"packs": 2, "sequences": 3, "stored": 18, "loss_tokens": 7}),
    ],
    ids=["a pack less", "a border more", "a mask of zeros", "a token less"],
)  # fmt: skip
def test_other_counts_than_the_receipts_are_named(tmp_path, packs, found):
    recorded = {"packs": 2, "sequences": 3, "stored": 19, "loss_tokens": 8}
    assert problems(tmp_path, table(packs)) == [f"holds {found}, but its receipt records {recorded}"]


def test_no_packs_and_missing_values_are_a_problem(tmp_path):
    nothing = {"packs": 0, "sequences": 0, "stored": 0, "loss_tokens": 0}
    (problem,) = problems(tmp_path, table([]))
    assert problem.startswith(f"holds {nothing}, but its receipt records ")
    for change in (
        {"input_ids": None},
        {"loss_mask": [0, None, 0]},
        {"seq_start_id": [0, None]},
        {"seq_start_id": None},
    ):
        folder = tmp_path / str(change)
        assert len(problems(folder, table([PACKS[0], {**PACKS[1], **change}], nullable=True))) == 1, change


@pytest.mark.parametrize(
    "types",
    [
        {name: kind for name, kind in TYPES.items() if name != "loss_mask"},
        {name: kind for name, kind in TYPES.items() if name != "document"},
        {**TYPES, "input_ids": pa.int64()},
        {**TYPES, "loss_mask": pa.float32()},
        dict(reversed(TYPES.items())),
    ],
    ids=["no mask", "no documents", "wider ids", "a mask of floats", "another order"],
)
def test_other_columns_are_named(tmp_path, types):
    assert problems(tmp_path, table(PACKS, types)) == [f"its columns are {list(types)}, not the columns of packs"]


def test_non_parquet_or_missing_file_is_named(tmp_path):
    store, receipt = proven(tmp_path, table(PACKS))
    path = Path(store.path(receipt.key, "all.parquet"))
    good = path.read_bytes()
    for content in (b"", b"PAR1", good[:-1], good[: len(good) // 2], b"x" * 1000):
        path.write_bytes(content)
        (problem,) = inspect_sft_shard(store, receipt)
        assert problem.startswith(f"{path}: cannot be read as packed Parquet: ")
    path.unlink()
    (problem,) = inspect_sft_shard(store, receipt)
    assert problem.startswith(f"{path}: cannot be read as packed Parquet: ")


def test_every_part_of_a_shard_is_looked_at(tmp_path):
    """A part that the receipt lists without saying what its file holds is a problem as well."""
    store, receipt = proven(tmp_path, table(PACKS))
    receipt.parts["valid"] = PartCount(0, 0)
    (problem,) = inspect_sft_shard(store, receipt)
    assert problem.startswith(f"{store.path(receipt.key, 'valid.parquet')}: cannot be read as packed Parquet: ")


# A whole preparation, whose files come to harm.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The sample of all kinds, to be repeated at will."""
    with sample("sft", tmp_path_factory.mktemp("whole")) as found:
        found.run()
        yield found.out, lambda: found.run()[0], tree(found.out)


def check(out):
    return verify(str(out), inspector_of(str(out)))


def reissued(store, receipt, changed, **counts):
    """Write files of a shard anew, and a receipt that vouches for them: a writer that went wrong."""
    kept = [output for output in receipt.outputs if output.path not in changed]
    outputs = [publish_bytes(store.path(receipt.key, name), content) for name, content in changed.items()]
    recorded = {
        name: getattr(receipt, name) for name in ("rows_in", "parts", "drops", "quarantined", "truncated", "facts")
    }
    store.issue(receipt.identity, outputs=[*kept, *outputs], **{**recorded, **counts})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda index, tokens: (index.slice(1), tokens), "holds PartCount"),
        (lambda index, tokens: (index.drop_columns(["row"]), tokens), "not the columns of sequences"),
        (lambda index, tokens: (index, tokens[4:]), "does not hold the"),
    ],
    ids=["a sequence less", "no rows", "a token less"],
)
def test_foreign_sequences_withdraw_their_shard(whole, change, problem):
    out, again, expected = whole
    plan = again().plan
    receipt = plan.store.receipt(plan.keys[0])
    names = "train.index.parquet", "train.tokens"
    index, tokens = (Path(plan.store.path(receipt.key, name)) for name in names)
    table, content = change(pq.read_table(index), tokens.read_bytes())
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream)
    reissued(plan.store, receipt, dict(zip(names, (stream.getvalue().to_pybytes(), content), strict=True)))
    found = check(out)
    assert any(problem in each for each in found.problems)
    assert found.withdrawn == [receipt.key]
    assert [shard.key for shard in again().plan.pending] == [receipt.key]
    assert tree(out) == expected


def test_packs_that_count_fewer_conversations_than_their_shards_are_named(whole):
    out, again, expected = whole
    receipt = next(each for each in pack_receipts(again()) if "train" in each.parts)
    store, count = Store(str(out / "shards"), "packs"), receipt.parts["train"]
    parts = {"train": PartCount(count.documents - 1, count.tokens)}
    reissued(store, receipt, {}, rows_in=receipt.rows_in - 1, parts=parts)
    assert any("conversations, but the shards have" in problem for problem in check(out).problems)
    again()
    assert tree(out) == expected
