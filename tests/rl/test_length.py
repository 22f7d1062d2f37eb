"""Rows that are too long are left out, and just those: what `tokenizers` itself counts is the truth."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.rl.kind import RL, build_rl_shard
from tokenmill.tasks.rl.shard import RowLengths
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.preparing import blend_of
from tests.preparing_rl import plan, prepare, write_rows
from tests.tokenize.small_vocabularies import BOS, EOS, byte_level_bpe, word_piece

WORDS = f"the mill Wasser 北京 \U0001f33e e\u0301 def f(x): return x ** 2  \n\t {EOS}{BOS} antidisestablishmentarianism"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def count(vocabulary):
    """Tokens of some texts, control strings being text like any other."""
    made = json.loads((vocabulary / "tokenizer.json").read_bytes())
    plain = Tokenizer.from_str(json.dumps({**made, "added_tokens": []}))
    return lambda *texts: sum(len(plain.encode(text, add_special_tokens=False).ids) for text in texts)


def text(number):
    """A text of another length for each number, from every part of the words."""
    return (WORDS * 3)[number % len(WORDS) :][: number * 7 % 150 + 1]


QUESTIONS = [{"input": text(number), "output": text(number * 31 + 5), "id": number} for number in range(120)]


def kept(manifest, key="train"):
    return [json.loads(line) for line in Path(manifest[key]).read_bytes().splitlines()] if manifest[key] else []


@pytest.fixture
def counting(vocabulary):
    return {"tokenizer": {"model": str(vocabulary)}, "target": "nemo_rl_sft"}


@pytest.mark.parametrize("place", [0, 40, 97, -1])
def test_exactly_the_rows_with_more_tokens_are_excluded(tmp_path, counting, count, place):
    """With the length of a row as the limit; that row is kept."""
    lengths = [count(row["input"], row["output"]) for row in QUESTIONS]
    most = sorted(lengths)[place]
    path = write_rows(tmp_path / "some.jsonl", QUESTIONS)
    _, manifest = prepare(
        blend_of(path), tmp_path / "out", max_tokens=most, shard_size=5000, allow_shrink=["some"], **counting
    )
    assert kept(manifest) == [row for row, length in zip(QUESTIONS, lengths, strict=True) if length <= most]
    dropped = sum(length > most for length in lengths)
    assert manifest["totals"]["dropped"] == ({"oversize": dropped} if dropped else {})
    assert manifest["totals"]["quarantined"] == 0
    assert manifest["totals"]["tokens"] == sum(length for length in lengths if length <= most)


def test_tokens_are_counted_after_transforms(tmp_path, counting, count):
    rows = [{"q": row["input"], "a": row["output"], "notes": "long " * 500} for row in QUESTIONS]
    path = write_rows(tmp_path / "some.jsonl", rows)
    transforms = [{"rename": {"input": "q", "output": "a"}}]
    _, manifest = prepare(blend_of(path), tmp_path / "out", transforms=transforms, max_tokens=60, **counting)
    expected = [row for row in rows if count(row["q"], row["a"]) <= 60]
    assert kept(manifest) == [{"input": row["q"], "output": row["a"]} for row in expected]


def test_kept_rows_keep_bytes_and_order(tmp_path, counting, count):
    lines = [b' {"output":%s ,"input" : "q"}' % json.dumps(text(number)).encode() for number in range(100)]
    path = write_rows(tmp_path / "some.jsonl", lines)
    held_out = {"holdout": {"valid": 0.3, "test": 0.3}}
    whole, cut = (
        prepare(blend_of(path), tmp_path / f"{most}", max_tokens=most, **counting, **held_out)[1]
        for most in (10_000, 50)
    )
    for key in ("train", "val", "test"):
        found = Path(cut[key]).read_bytes().splitlines()
        before = Path(whole[key]).read_bytes().splitlines()
        assert found == [line for line in before if count("q", json.loads(line)["output"]) <= 50]
        assert 0 < len(found) < len(before)
    counted = {name: books["tokens"] for name, books in cut["totals"]["splits"].items()}
    for split, key in (("train", "train"), ("valid", "val"), ("test", "test")):
        assert counted[split] == sum(count(row["input"], row["output"]) for row in kept(cut, key))


def test_a_tokenizer_that_only_the_reference_can_run_counts_as_well(tmp_path):
    folder = word_piece(tmp_path / "wordpiece")
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [{"input": row["input"].replace(EOS, "").replace(BOS, ""), "output": "so"} for row in QUESTIONS]
    path = write_rows(tmp_path / "some.jsonl", rows)
    lengths = [sum(len(reference.encode(row[key]).ids) for key in ("input", "output")) for row in rows]
    most = sorted(lengths)[60]
    chosen = {"tokenizer": {"model": str(folder)}, "target": "nemo_rl_sft", "max_tokens": most}
    _, manifest = prepare(blend_of(path), tmp_path / "out", **chosen)
    assert manifest["recipes"][0]["recipe"]["backend"] == "reference"
    found = [row for row, length in zip(rows, lengths, strict=True) if length <= most]
    assert kept(manifest) == [row for row in found if row["input"]]


def test_without_a_limit_no_tokenizer_is_asked_for(tmp_path):
    path = write_rows(tmp_path / "some.jsonl", QUESTIONS[:5])
    chosen = {"target": "nemo_rl_sft", "tokenizer": {"model": str(tmp_path / "nowhere")}}
    _, manifest = prepare(blend_of(path), tmp_path / "out", **chosen)
    assert kept(manifest) == QUESTIONS[:5]
    assert manifest["totals"]["tokens"] == 0
    assert "tokenizer" not in manifest
    with pytest.raises(InputError, match="nowhere"):
        plan(blend_of(path), tmp_path / "out", max_tokens=5, **chosen)


def test_worker_with_different_tokenizer_fails(tmp_path, counting):
    path = write_rows(tmp_path / "some.jsonl", QUESTIONS)
    planned = plan(blend_of(path), tmp_path / "out", max_tokens=5, **counting)
    other = TokenizerSource(model=str(byte_level_bpe(tmp_path / "other", size=400))).model_dump()
    with pytest.raises(RunError, match=r"tokenizer\.model: .* in the plan; give all workers the same files"):
        build_rl_shard(
            planned.plan.pending[0], planned.plan.store, **RL.stages[0].arguments(planned) | {"tokenizer": other}
        )


class Lengths:
    """An encoder whose tokens are characters."""

    def __init__(self, lengths=()):
        self.lengths = lengths

    def encode(self, texts):
        return Lengths([len(each) for each in texts.to_pylist()])


@pytest.mark.parametrize("records", [[[]], [[], []], [["ab"], [], ["c", "", "def"]], [[""], ["a"]], [[], ["a"], []]])
def test_texts_are_added_up_by_row_also_where_a_row_has_none(records):
    lengths = RowLengths(lambda record: record["texts"], Lengths(), 5).of([{"texts": texts} for texts in records])
    assert lengths.tolist() == [len("".join(texts)) for texts in records]
    assert lengths.dtype == "int64"
