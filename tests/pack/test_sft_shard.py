"""A shard of packs: no row is lost, every stored sequence and mask is what `transformers` makes of the conversation, and
a trainer that collates the rows as Megatron-Bridge does learns the assistant's words from nothing but what led to them.
"""

import gzip
import io
import itertools
import json
import logging
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenmill.tasks.chat import programs
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.programs import Programs
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.pack import shard as shard_module
from tokenmill.tasks.pack.kind import SFT, build_sft_shard, pack_counts, packing_lines
from tokenmill.tasks.pack.packs import UNPACKED_REASONS
from tokenmill.tasks.report.page import leave_report
from tokenmill.tasks.report.summary import artifact_record, markdown, print_summary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from transformers import PreTrainedTokenizerFast

from tests.flows.cloning import REPOSITORY
from tests.pack.small_packs import files_of, packs_of, sequences_of
from tests.peers.conversations import assistant, call, function, system, talk, thinking, tool, user
from tests.preparing import blend_of, quarantined, tree
from tests.preparing_sft import CHATML, UNMARKED, build, chat_vocabulary, pack_receipts, plan, prepare, write_rows

PADDING_ROLE, ASSISTANT_ROLE = 6, 4
PACK_SIZE = 1024
KEEPING = {"template_variables": {"keep_reasoning": True}}
PACKINGS = ["best_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"]


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return PreTrainedTokenizerFast(tokenizer_file=str(vocabulary / "tokenizer.json"), eos_token="<|endoftext|>")


@pytest.fixture
def chosen(vocabulary):
    return {"tokenizer": {"model": str(vocabulary)}, "pack_size": PACK_SIZE}


# What transformers makes of a conversation.


def rendered(tokenizer, record, messages=None, template=CHATML, **variables):
    """Ids, and a flag per token that is set where the assistant generates it."""
    encoded = tokenizer.apply_chat_template(
        messages or record["messages"], tools=record.get("tools"), chat_template=template, return_dict=True,
        return_assistant_tokens_mask=True, **variables,
    )  # fmt: skip
    return encoded["input_ids"], encoded["assistant_masks"]


def whole(tokenizer, record):
    """The one sequence of a conversation whose reasoning is kept."""
    return rendered(tokenizer, record, keep_reasoning=True)


def by_turn(tokenizer, record):
    """One sequence per answered question: what came before it as history, and only its answers trained on."""
    messages = record["messages"]
    if not any(message.get("reasoning_content") for message in messages):
        return [rendered(tokenizer, record)]
    questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
    sequences = []
    for start, stop in itertools.pairwise([*questions, len(messages)]):
        ids, generated = rendered(tokenizer, record, messages[:stop])
        asked, _ = rendered(tokenizer, record, messages[: start + 1])
        assert ids[: len(asked)] == asked
        sequences.append((ids, [0] * len(asked) + generated[len(asked) :]))
    return [(ids, generated) for ids, generated in sequences if any(generated)]


def shifted(sequence, size=None):
    """The sequence as it is to be stored, cut after `size` tokens: 1 at i where token i + 1 is trained on."""
    ids, generated = sequence[0][:size], sequence[1][:size]
    return tuple(ids), (*generated[1:], 0)


WORDS = [
    *["mill", "grain", "the", "Wasser", "wheel", "0.5", "17", "çà", "北京", "🌾", "é", "f(x)", "=>"],
    "  \n\t",
    "\n\n",
]
CLOCK = function("clock", "What time it is.", [], zone={"type": "string"})


def conversations(count, seed=0):
    """Random conversations of every kind, each with its number in its first question. No answer begins with a blank:
    tokenizers may join that with the line break of the prompt, which generation never could.
    """
    source = random.Random(seed)

    def words(most=6):
        return source.choice(["Mill", "Grain", "7"]) + " ".join(source.choices(WORDS, k=source.randint(0, most)))

    def answer():
        calls = [call("clock", zone=words(2), deep={"n": [1, None, "é"]})] * source.choice([0, 0, 1, 2])
        content = source.choice([None, words()]) if calls else words()
        made = [thinking(source.choice([None, words(12)]), content, *calls)]
        return [*made, *(tool(words()) for _ in calls), *([assistant(words())] if calls else [])]

    def one(number):
        turns = [[user(words()), *answer()] for _ in range(source.randint(1, 4))]
        turns[0][0] = user(f"#{number}# {words()}")
        first = [system(words())] * source.choice([0, 1])
        last = [user("Are you there?")] * source.choice([0, 0, 0, 1])
        return talk(*first, *itertools.chain(*turns), *last, tools=source.choice([None, [CLOCK]]))

    return [one(number) for number in range(count)]


CONVERSATIONS = conversations(40)


@pytest.fixture(scope="module")
def kept(tokenizer):
    """The sequence of each conversation, with its reasoning kept."""
    return [whole(tokenizer, record) for record in CONVERSATIONS]


@pytest.fixture(scope="module")
def stripped(tokenizer):
    """All sequences of the conversations where reasoning is stripped from earlier turns."""
    return [sequence for record in CONVERSATIONS for sequence in by_turn(tokenizer, record)]


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_packs_hold_exactly_what_transformers_renders_and_masks(tmp_path, chosen, kept, packing, template):
    source = write_rows(tmp_path / "some.jsonl", CONVERSATIONS)
    chosen |= {**KEEPING, "chat_template": template, "packing": packing}
    prepare(blend_of(source), tmp_path / "out", **chosen)
    packs = packs_of(tmp_path / "out")
    truth = dict(enumerate(map(shifted, kept)))
    found = {sequence.document: sequence.learnable for pack in packs for sequence in pack}
    assert found == truth
    assert sum(map(len, packs)) == len(truth)
    assert len(packs) < len(truth)


@pytest.mark.parametrize("shard_size", [3_000, 10**9])
def test_a_conversation_with_reasoning_is_one_sequence_per_question(tmp_path, chosen, stripped, shard_size):
    source = write_rows(tmp_path / "some.jsonl", CONVERSATIONS)
    planned, _ = prepare(blend_of(source), tmp_path / "out", shard_size=shard_size, **chosen)
    assert (len(planned.plan.shards) > 3) == (shard_size == 3_000)
    truth = Counter(map(shifted, stripped))
    assert truth.total() > 1.5 * len(CONVERSATIONS)
    assert Counter(sequence.learnable for sequence in sequences_of(tmp_path / "out")) == truth


TOKENIZED = [
    lambda ids, mask: {"input_ids": ids, "labels": [each if on else -100 for each, on in zip(ids, mask, strict=True)]},
    lambda ids, mask: {"input_ids": ids, "loss_mask": [*map(bool, mask)], "text": "…"},
    lambda ids, mask: {"input_ids": ids, "assistant_masks": mask, "completion_mask": [0, *[1] * (len(ids) - 1)]},
    lambda ids, mask: {"input_ids": ids, "completion_mask": mask, "attention_mask": [1] * len(ids), "tools": ["…"]},
    lambda ids, mask: {"prompt_ids": ids[:3], "prompt_mask": mask[:3], "completion_ids": ids[3:], "completion_mask": mask[3:]},
]  # fmt: skip
"""Forms of rows that are tokenized already."""


@pytest.mark.parametrize("mixed", [True, False])
def test_tokenized_rows_are_packed_as_they_are(tmp_path, chosen, kept, mixed):
    """Beside the same conversations in messages, and alone, when there is nothing to encode."""
    rows = [TOKENIZED[number % 5](*sequence) for number, sequence in enumerate(kept)]
    if mixed:
        rows[::3] = CONVERSATIONS[::3]
    bad = [{"input_ids": [1, 500], "loss_mask": [0, 1]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}]
    source = write_rows(tmp_path / "some.jsonl", [*rows, *bad])
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen | KEEPING)
    found = sequences_of(tmp_path / "out")
    assert {sequence.document: sequence.learnable for sequence in found} == dict(enumerate(map(shifted, kept)))
    assert len(found) == len(rows)
    totals = manifest["totals"]
    assert totals["dropped"] == {"bad_tokens": 1, "nothing_trained": 1}
    assert totals["not_read"]["datasets/some"]["tools"] == sum("attention_mask" in row for row in rows)


WIDE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- '<|im_start|>assistant\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
"""A template that has the assistant's header trained on as well, and so the first token of some sequences."""


def test_a_first_token_is_never_predicted_from_the_sequence_before(tmp_path, chosen, tokenizer):
    rows = [talk(assistant("Yes?"), user(f"{number}?"), assistant(f"{number}.")) for number in range(20)]
    source = write_rows(tmp_path / "some.jsonl", rows)
    prepare(blend_of(source), tmp_path / "out", **chosen | {"chat_template": WIDE})
    truth = [shifted(rendered(tokenizer, record, template=WIDE)) for record in rows]
    assert Counter(sequence.learnable for sequence in sequences_of(tmp_path / "out")) == Counter(truth)
    assert all(mask[:2] == (1, 1) and mask[-1] == 0 for _, mask in truth)


# What a trainer makes of a row.


@dataclass(frozen=True)
class Collated:
    """One row as a model gets it: all arrays [pack_size] but `cu_seqlens`, the borders of the segments."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: list[int]


def collate(pack, size, eos):
    """A row as Megatron-Bridge 0.6.2 collates it (GPTSFTPackedParquetDataset, pad_to_max_length): the last token of each
    sequence is no input, the first no label; what is left of the row is a segment of its own.
    """
    tokens, labels, loss, positions, borders = [], [], [], [], [0]
    for sequence in pack:
        tokens += sequence.ids[:-1]
        labels += sequence.ids[1:]
        loss += sequence.mask[:-1]
        positions += range(len(sequence.ids) - 1)
        borders.append(len(tokens))
    assert len(tokens) <= size
    rest = size - len(tokens)
    filled = [tokens + [eos] * rest, labels + [eos] * rest, loss + [0] * rest, positions + [0] * rest]
    return Collated(*map(np.array, filled), [*borders, size] if rest else borders)


def learned_from(batch):
    """What is learned of a batch: every label with a loss, and all tokens that its place attends to, in order."""
    places = np.arange(len(batch.tokens))
    segments = np.searchsorted(batch.cu_seqlens, places, side="right")
    attends = (segments[:, None] == segments) & (places[:, None] >= places)
    for place in np.flatnonzero(batch.loss_mask):
        context = batch.tokens[attends[place]]
        assert len(context) == batch.position_ids[place] + 1
        yield tuple(context.tolist()), int(batch.labels[place])


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_trainer_learns_each_answer_from_what_led_to_it_and_nothing_else(
    tmp_path, chosen, tokenizer, stripped, multiple
):
    source = write_rows(tmp_path / "some.jsonl", CONVERSATIONS)
    prepare(blend_of(source), tmp_path / "out", pad_seq_to_mult=multiple, **chosen)
    eos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    found = Counter()
    for pack in packs_of(tmp_path / "out"):
        batch = collate(pack, PACK_SIZE, eos)
        found.update(learned_from(batch))
        assert all(border % multiple == 0 for border in batch.cu_seqlens)
    expected = Counter(
        (tuple(ids[:place]), ids[place])
        for ids, generated in stripped
        for place in range(1, len(ids))
        if generated[place]
    )
    assert found == expected


@pytest.mark.parametrize("multiple", [2, 64])
def test_sequences_are_filled_up_to_a_multiple_and_one(tmp_path, chosen, tokenizer, kept, multiple):
    source = write_rows(tmp_path / "some.jsonl", CONVERSATIONS)
    chosen |= {**KEEPING, "pad_seq_to_mult": multiple}
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    eos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    lengths = []
    for sequence in sequences_of(tmp_path / "out"):
        ids, mask = shifted(kept[sequence.document])
        padding = len(sequence.ids) - len(ids)
        assert len(sequence.ids) % multiple == 1
        assert 0 <= padding < multiple
        assert sequence.ids == ids + (eos,) * padding
        assert sequence.mask == mask + (0,) * padding
        assert sequence.roles[len(ids) :] == (PADDING_ROLE,) * padding
        assert PADDING_ROLE not in sequence.roles[: len(ids)]
        lengths.append(len(ids))
    assert len(lengths) == len(CONVERSATIONS)
    assert manifest["totals"]["tokens"] == sum(lengths)


def test_padding_needs_a_token_to_pad_with(tmp_path, chosen, vocabulary):
    source = write_rows(tmp_path / "some.jsonl", CONVERSATIONS[:2])
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    (nameless / "tokenizer.json").write_bytes((vocabulary / "tokenizer.json").read_bytes())
    chosen |= {"tokenizer": {"model": str(nameless)}}
    prepare(blend_of(source), tmp_path / "out", **chosen)
    with pytest.raises(InputError, match=r"^pad_seq_to_mult=4: .* eos_token"):
        prepare(blend_of(source), tmp_path / "out", pad_seq_to_mult=4, **chosen)


def test_file_matches_the_reader(tmp_path, chosen):
    """The rules of its `validate_row`, and row groups that it can hold in memory."""
    rows = [talk(user(f"{number}?"), assistant("Yes.")) for number in range(1_000, 2_100)]
    chosen |= {"pack_size": 40}
    prepare(blend_of(write_rows(tmp_path / "some.jsonl", rows)), tmp_path / "out", **chosen)
    [path] = files_of(tmp_path / "out")
    file = pq.ParquetFile(path)
    assert {"input_ids", "seq_start_id", "loss_mask"} <= set(file.schema_arrow.names)
    assert file.metadata.num_rows > 1_000
    assert all(file.metadata.row_group(number).num_rows <= 500 for number in range(file.num_row_groups))
    rows = file.read().to_pylist()
    assert sorted(number for row in rows for number in row["document"]) == list(range(1_100))
    assert len({tuple(row["input_ids"]) for row in rows}) == len(rows)
    for row in rows:
        ids, mask, starts = row["input_ids"], row["loss_mask"], row["seq_start_id"]
        assert len(mask) == len(ids) <= 40
        assert set(mask) <= {0, 1}
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert starts[-1] < len(ids)
        assert not any(mask[end - 1] for end in [*starts[1:], len(ids)])


def test_receipt_matches_its_file(tmp_path, chosen):
    source = write_rows(tmp_path / "some.jsonl", CONVERSATIONS)
    chosen |= {"pad_seq_to_mult": 8, "holdout": {"valid": 0.3, "test": 0}}
    planned, _ = prepare(blend_of(source), tmp_path / "out", **chosen)
    (shard,) = planned.plan.store.proven(planned.plan.keys).values()
    receipts = {part: receipt for receipt in pack_receipts(planned) for part in receipt.parts}
    assert shard.parts.keys() == receipts.keys() == {"train", "valid"}
    for part, receipt in receipts.items():
        count = receipt.parts[part]
        assert shard.parts[part].documents == receipt.rows_in == count.documents
        packs = packs_of(tmp_path / "out", part)
        sequences = list(itertools.chain(*packs))
        padding = sum(sequence.roles.count(PADDING_ROLE) for sequence in sequences)
        stored = [sum(len(sequence.ids) for sequence in pack) for pack in packs]
        assert count.documents == len({sequence.document for sequence in sequences})
        assert count.tokens == sum(stored) - padding
        assert receipt.facts[part] == {
            "packs": len(packs),
            "sequences": len(sequences),
            "tokens": count.tokens,
            "padding": padding,
            "loss_tokens": sum(sum(sequence.mask) for sequence in sequences),
            "longest": max(len(sequence.ids) for sequence in sequences),
            "most_sequences": max(map(len, packs)),
            "shortest_pack": min(stored),
        }


# What becomes of the order of rows, and of how they are batched and stored.


@pytest.mark.parametrize("packing", PACKINGS[:3])
def test_the_order_of_rows_changes_no_pack(tmp_path, chosen, packing):
    alike = [talk(user(f"{a}?"), assistant(f"{b}.")) for a in range(8) for b in range(8)]
    rows = [*CONVERSATIONS, *CONVERSATIONS[:7], *alike]
    found = []
    for seed in range(2):
        path = write_rows(tmp_path / f"{seed}.jsonl", random.Random(seed).sample(rows, len(rows)))
        prepare(blend_of(path), tmp_path / f"out{seed}", packing=packing, **chosen)
        found.append([[sequence.learnable for sequence in pack] for pack in packs_of(tmp_path / f"out{seed}")])
    assert found[0] == found[1]


@pytest.mark.parametrize("oversize", ["drop", "truncate"])
def test_a_conversation_of_many_sequences_is_encoded_bit_by_bit_and_counted_once(
    tmp_path, chosen, monkeypatch, oversize
):
    turn = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Seven.", "reasoning_content": "Count them, one by one."},
    ]
    source = write_rows(tmp_path / "some.jsonl", [{"messages": turn * count} for count in (30, 1, 30, 2)])
    chosen |= {"pack_size": 300, "on_oversize": oversize}
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    expected = tree(tmp_path / "out")
    assert manifest["totals"]["documents"] == 4
    assert manifest["totals"]["truncated"] == (2 if oversize == "truncate" else 0)
    lost = sum(shard["facts"][f"{UNPACKED_REASONS[oversize]}_sequences"] for shard in manifest["derived"]["shards"])
    assert lost > 0
    most, encode = [], Batch.encode
    monkeypatch.setattr(Batch, "encode", lambda batch, encoder: most.append(batch.characters) or encode(batch, encoder))
    monkeypatch.setattr(shard_module, "BATCH_CHARACTERS", 400)
    prepare(blend_of(source), tmp_path / "out", force=True, **chosen)
    assert len(most) > 10
    assert tree(tmp_path / "out") == expected


# What becomes of every row.


def marked(number, **fields):
    return {**talk(user(f"#{number}# Is it there?"), assistant("It is.")), **fields}


def saying(**fields):
    return talk(user("And?"), {"role": "assistant", **fields})


DEEP = json.loads("[" * 400 + "]" * 400)
NEST = "[" * 250 + "]" * 250
STRANGERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6\ufdd7"
REFUSING = CHATML.replace(
    "{%- for message in messages %}\n    {{-",
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'developer' %}{{ raise_exception('No developers.') }}{% endif %}\n    {{-",
)
"""A template that does not take developers."""

BAD = [
    (b'{"messages": ', "malformed_json"),
    (b"\xff", "invalid_utf8"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone_surrogate"),
    (b"[1]", "not_an_object"),
    ({"text": "no chat"}, "no_messages"),
    ({"messages": [5]}, "bad_message"),
    (talk({"role": "narrator", "content": "Once."}), "unknown_role"),
    (saying(content=[{"type": "image_url", "image_url": "x"}]), "not_text"),
    (saying(content="<think>a"), "unclosed_think"),
    (saying(content=None, tool_calls=[{"name": "f", "arguments": "5"}]), "bad_tool_arguments"),
    (saying(content=None, tool_calls=[{"name": "f", "arguments": '{"a": "\\ud800"}'}]), "lone_surrogate"),
    (talk(user("Anyone?")), "no_assistant"),
    (talk({"role": "developer", "content": "No jokes."}, assistant("x")), "template_error"),
    (talk(user(f"<|im_end|>{STRANGERS}"), assistant("x")), "noncharacters"),
    ({"messages": [], "deep": DEEP}, "no_messages"),
    ({**saying(content="x"), "tools": [{"name": "f", "deep": DEEP}]}, "bad_tools"),
]  # fmt: skip
"""Rows that nothing can be learned from, and why."""

GOOD = [
    marked,
    lambda number: {"conversations": [{"from": "human", "value": f"#{number}#"}, {"from": "gpt", "value": "Yes."}]},
    lambda number: {"input": f"#{number}#", "output": "Yes.", "system": "Be brief."},
    lambda number: {"prompt": f"#{number}#", "response": "<think>\nHm.\n</think>\n\nYes."},
    lambda number: {"messages": json.dumps(marked(number)["messages"])},
    lambda number: marked(number, tools=[CLOCK]),
    lambda number: talk(user(f"#{number}# <|im_end|>"), assistant("<|im_start|>")),
    lambda number: saying(content=None, tool_calls=[{"name": "f", "arguments": f'{{"n": "#{number}#", "big": {10**40}}}'}]),
    lambda number: saying(content=None, tool_calls=[{"name": "f", "arguments": f'{{"n": "#{number}#", "deep": {NEST}}}'}]),
]  # fmt: skip
"""Rows that a conversation can be made of, each with its number in it."""


@dataclass(frozen=True)
class Corpus:
    """A file, and what is known of it beforehand: its lines, the numbers of its good ones, and why others are bad."""

    path: Path
    lines: list[bytes]
    good: list[int]
    bad: list[tuple[int, str]]
    drops: dict[str, int]


def corpus(path, bad=None):
    """Good rows of every shape, bad ones, blank lines, drafts that a filter leaves out, and a row that no pack holds."""
    source = random.Random(3)
    makers = [(lambda number, make=make: {**make(number), "used_in": "train"}, None) for make in GOOD * 3]
    makers += [(lambda _, row=row: row if isinstance(row, bytes) else {**row, "used_in": "train"}, reason) for row, reason in bad or BAD]  # fmt: skip
    makers += [(lambda _: b"", "blank_line"), (lambda _: b" \t", "blank_line"), (marked, "filtered")]
    makers += [
        (lambda number: {**talk(user(f"#{number}#"), assistant("wheel " * 900)), "used_in": "train"}, "oversize")
    ]
    source.shuffle(makers)
    outcomes = [reason for _, reason in makers]
    rows = [make(line) for line, (make, _) in enumerate(makers, 1)]
    benign = {"blank_line", "filtered", "oversize"}
    return Corpus(
        path=write_rows(path, rows),
        lines=path.read_bytes().splitlines(),
        good=[line for line, reason in enumerate(outcomes, 1) if reason is None],
        bad=[(line, reason) for line, reason in enumerate(outcomes, 1) if reason and reason not in benign],
        drops=Counter(reason for reason in outcomes if reason),
    )


def from_training(path):
    """A blend of one file, of which only what is used in training is taken."""
    (source,) = blend_of(path)["datasets"]
    return {"datasets": [{**source, "used_in": "train"}]}


def numbers_in(sequences, tokenizer):
    """The numbers that conversations have in them, one for each sequence."""
    texts = tokenizer.batch_decode([list(sequence.ids) for sequence in sequences])
    return [int(number) for text in texts for number in re.findall(r"#(\d+)#", text)]


@pytest.mark.parametrize(("shard_size", "zipped"), [(300, False), (10**9, False), (10**9, True)])
def test_every_row_is_a_document_or_a_counted_drop(tmp_path, chosen, tokenizer, shard_size, zipped):
    given = corpus(tmp_path / "some.jsonl")
    path = given.path
    if zipped:
        path = tmp_path / "some.jsonl.gz"
        path.write_bytes(gzip.compress(given.path.read_bytes()))
    chosen |= {"chat_template": REFUSING, "shard_size": shard_size, "holdout": {"valid": 0.2, "test": 0}}
    _, manifest = prepare(from_training(path), tmp_path / "out", **chosen)
    totals = manifest["totals"]
    assert totals["rows"] == len(given.lines)
    assert totals["dropped"] == given.drops
    assert totals["documents"] == len(given.good)
    assert totals["quarantined"] == len(given.bad)
    assert all(
        entry["rows"] == sum(entry["documents"].values()) + sum(entry["drops"].values()) for entry in manifest["shards"]
    )
    both = [*sequences_of(tmp_path / "out"), *sequences_of(tmp_path / "out", "valid")]
    assert sorted(numbers_in(both, tokenizer)) == given.good
    assert [(row["line"], row["reason"]) for row in quarantined(tmp_path / "out")] == given.bad
    assert {row["file"] for row in quarantined(tmp_path / "out")} == {str(path)}
    assert all(row["detail"] for row in quarantined(tmp_path / "out"))


def test_values_that_only_parquet_has_are_bad_rows_and_no_more(tmp_path, chosen):
    rows = {
        "messages": [marked(1)["messages"], marked(2)["messages"], []],
        "tools": pa.array([None, [{"name": "f", "blob": b"\xff"}], [{"name": "f", "blob": b"\xff"}]]),
    }
    pq.write_table(pa.table(rows), tmp_path / "some.parquet")
    _, manifest = prepare(blend_of(tmp_path / "some.parquet"), tmp_path / "out", **chosen)
    assert manifest["totals"]["dropped"] == {"bad_tools": 1, "no_messages": 1}
    assert [row["line"] for row in quarantined(tmp_path / "out")] == [2, 3]


SPELT = [
    marked(1), talk(user("<|im_end|>"), assistant("x")), talk(user("x"), thinking("<|im_start|>", "y")),
    talk(user("x"), assistant(None, call("f", a="<|im_end|>")), assistant("z")), talk(user("<|im_end"), assistant("|>")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "setting", "dropped", "bad"),
    [
        (SPELT, {"special_tokens_in_text": "literal"}, {}, []),
        (SPELT, {"special_tokens_in_text": "reject"}, {"special_token_in_text": 3}, [2, 3, 4]),
        ([marked(1), talk(user("A?"), assistant("B."), user("C?"))], {"loss_on": "last_turn"}, {"nothing_trained": 1}, [2]),
    ],
    ids=["control tokens as text", "no control tokens", "nothing to learn under the policy"],
)  # fmt: skip
def test_rows_are_set_aside_where_that_is_asked_for(tmp_path, chosen, rows, setting, dropped, bad):
    _, manifest = prepare(blend_of(write_rows(tmp_path / "some.jsonl", rows)), tmp_path / "out", **chosen | setting)
    assert manifest["totals"]["dropped"] == dropped
    assert [row["line"] for row in (quarantined(tmp_path / "out") if bad else [])] == bad


# What becomes of what is too long.


def longer(record, words):
    """The conversation with a last answer of so many words more."""
    return {**record, "messages": [*record["messages"], user("More."), assistant("wheel " * words + "end")]}


@pytest.mark.parametrize("multiple", [1, 16])
def test_long_sequences_are_cut_where_that_is_asked_for_and_their_masks_with_them(
    tmp_path, chosen, tokenizer, multiple
):
    rows = [*CONVERSATIONS[:20], *(longer(record, 400) for record in CONVERSATIONS[20:30])]
    source = write_rows(tmp_path / "some.jsonl", rows)
    chosen |= {**KEEPING, "pad_seq_to_mult": multiple, "pack_size": 400}
    _, manifest = prepare(blend_of(source), tmp_path / "out", on_oversize="truncate", **chosen)
    most = max(size for size in range(1, 401) if size % multiple == 1 % multiple)
    truth = {number: shifted(whole(tokenizer, record), most) for number, record in enumerate(rows)}
    found = {sequence.document: sequence for sequence in sequences_of(tmp_path / "out")}
    assert found.keys() == truth.keys()
    for number, (ids, mask) in truth.items():
        assert found[number].ids[: len(ids)] == ids
        assert found[number].mask == mask + (0,) * (len(found[number].ids) - len(ids))
    cut = [record for record in rows if len(whole(tokenizer, record)[0]) > most]
    assert manifest["totals"]["truncated"] == len(cut) >= 10
    assert f"{len(cut)} conversations with a sequence that is cut to the size of a pack" in packing_lines(manifest)
    assert manifest["totals"]["dropped"] == {}


NOTHING_PREDICTED = "{% for m in messages %}{{ m.content ~ '<|im_end|>' }}{% endfor %}"
"""A template of which only the first token may be trained on, which nothing predicts."""


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (CHATML, talk(user("word " * 300), assistant("Yes.")), "nothing_trained_in_pack"),
        (NOTHING_PREDICTED, talk(assistant(""), user("word " * 300)), "nothing_trained"),
    ],
)
def test_sequence_masked_after_its_cut_is_dropped(tmp_path, chosen, template, row, reason):
    source = write_rows(tmp_path / "some.jsonl", [row])
    chosen |= {"chat_template": template, "pack_size": 100, "on_oversize": "truncate", "allow_shrink": ["some"]}
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    assert manifest["totals"]["dropped"] == {reason: 1}
    assert files_of(tmp_path / "out") == []


def test_answer_beyond_the_cut_is_counted(tmp_path, chosen, tokenizer):
    record = talk(user("#1#"), thinking("Hm.", "A."), user("word " * 300), thinking("Well.", "B."))
    source = write_rows(tmp_path / "some.jsonl", [record])
    chosen |= {"pack_size": 100, "on_oversize": "truncate"}
    planned, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    (receipt,) = pack_receipts(planned)
    assert receipt.facts["nothing_trained_in_pack_sequences"] == 1
    assert any(
        "1 sequence with only masked tokens before the cut, excluded" in line for line in packing_lines(manifest)
    )
    assert pack_counts(manifest)["left_out"] == {"nothing_trained_in_pack_sequences": 1}
    assert (manifest["totals"]["dropped"], manifest["totals"]["truncated"]) == ({}, 0)
    first, _ = by_turn(tokenizer, record)
    assert [sequence.learnable for sequence in sequences_of(tmp_path / "out")] == [shifted(first)]


def test_long_sequences_are_dropped_and_their_conversation_only_with_the_last_of_them(tmp_path, chosen, tokenizer):
    """One turn of the first conversation is too long with all that comes before it, all of the second are."""
    reasoned = [
        talk(user("#1#"), thinking("Hm.", "A."), user("B?"), thinking("Well.", "wheel " * 300)),
        talk(user("#2#" + " mill" * 300), thinking("Hm.", "A."), user("B?"), thinking("Well.", "C.")),
        talk(user("#3#"), thinking("Hm.", "A."), user("B?"), thinking("Well.", "C.")),
    ]
    source = write_rows(tmp_path / "some.jsonl", reasoned)
    planned, manifest = prepare(blend_of(source), tmp_path / "out", **chosen | {"pack_size": 200})
    assert manifest["totals"]["documents"] == 2
    assert manifest["totals"]["dropped"] == {"oversize": 1}
    assert sorted(numbers_in(sequences_of(tmp_path / "out"), tokenizer)) == [1, 3, 3]
    (receipt,) = pack_receipts(planned)
    assert receipt.facts["oversize_sequences"] == 3
    assert pack_counts(manifest)["left_out"] == {"oversize_sequences": 3}


@pytest.mark.parametrize("shard_size", [60, 10**9])
def test_a_long_sequence_stops_the_run_where_that_is_asked_for(tmp_path, chosen, shard_size):
    rows = [marked(1), b"", marked(3), talk(user("#4#"), assistant("wheel " * 400)), marked(5)]
    source = write_rows(tmp_path / "some.jsonl", rows)
    chosen |= {"on_oversize": "error", "pack_size": 200, "shard_size": shard_size}
    with pytest.raises(RunError, match=rf"^{source}:4: a sequence of [\d,]+ tokens, but pack_size is 200; raise"):
        prepare(blend_of(source), tmp_path / "out", **chosen)
    assert not (tmp_path / "out/blend.json").exists()


@pytest.mark.parametrize("multiple", [1, 13])
def test_a_sequence_as_long_as_a_pack_is_kept_and_one_token_more_is_not(tmp_path, chosen, tokenizer, multiple):
    source = write_rows(tmp_path / "some.jsonl", [marked(1)])
    ((ids, _),) = by_turn(tokenizer, marked(1))
    stored = next(size for size in range(len(ids), len(ids) + multiple) if (size - 1) % multiple == 0)
    assert (stored > len(ids)) == (multiple > 1)
    chosen |= {"pad_seq_to_mult": multiple, "allow_shrink": ["some"]}
    for size, documents in ((stored, 1), (stored - 1, 0)):
        _, manifest = prepare(blend_of(source), tmp_path / f"out{size}", **chosen | {"pack_size": size})
        assert manifest["totals"]["documents"] == documents
        assert manifest["totals"]["dropped"] == ({} if documents else {"oversize": 1})


# What is held out.


SHARES = {"valid": 0.1, "test": 0.05}
HELD_OUT = [
    talk(user(f"#{number}#"), thinking("Hm.", f"{number * 7919 % 10_007}"), user("And?"), thinking("Well.", "Yes."))
    for number in range(900)
]


@pytest.fixture(scope="module")
def held_out(vocabulary, tokenizer, tmp_path_factory):
    """`held_out(rows…)`: how often each conversation's number occurs in each split."""

    def held_out(*sources, **settings):
        folder = tmp_path_factory.mktemp("held_out")
        paths = [write_rows(folder / f"s{number}.jsonl", rows) for number, rows in enumerate(sources)]
        settings = {"pack_size": 256, "tokenizer": {"model": str(vocabulary)}, "holdout": SHARES, **settings}
        prepare(blend_of(*paths), folder / "out", **settings)
        return {
            split: Counter(numbers_in(sequences_of(folder / "out", split), tokenizer))
            for split in ("train", "valid", "test")
        }

    return held_out


@pytest.fixture(scope="module")
def splits(held_out):
    """900 conversations of two sequences each, every third once more in another source and in another shape."""
    shapes = {"user": "human", "assistant": "gpt"}
    again = [
        {"conversations": [
            {"from": shapes[message["role"]], "value": message["content"] if message["role"] == "user" else f"<think>{message['reasoning_content']}</think>\n{message['content']}"}
            for message in record["messages"]
        ]}
        for record in HELD_OUT[::3]
    ]  # fmt: skip
    return held_out(HELD_OUT, again)


def test_shares_and_equal_conversations_in_splits(held_out, splits):
    for split, share in {**SHARES, "train": 0.85}.items():
        deviation = (share * (1 - share) * len(HELD_OUT)) ** 0.5
        assert abs(len(splits[split]) - share * len(HELD_OUT)) < 5 * deviation
    assert sum(map(len, splits.values())) == len(HELD_OUT)
    assert splits["train"] + splits["valid"] + splits["test"] == Counter({n: 2 if n % 3 else 4 for n in range(900)})
    other = held_out(HELD_OUT[:300], holdout={**SHARES, "seed": 43})["valid"].keys()
    assert len(other & splits["valid"].keys()) < len(other) / 2


def test_neither_order_nor_slices_nor_company_move_a_conversation(held_out, splits):
    some = random.Random(1).sample(HELD_OUT, 300)
    found = held_out(some, shard_size=5_000)
    wanted = {int(record["messages"][0]["content"].strip("#")) for record in some}
    for split, numbers in found.items():
        assert numbers.keys() == splits[split].keys() & wanted


def test_conversations_with_different_ends_are_distinct(held_out):
    alike = [talk(user("Say a number."), assistant(f"#{number}#")) for number in range(200)]
    found = held_out(alike, holdout={"valid": 0.5, "test": 0})
    assert 50 < len(found["valid"]) < 150


def test_a_split_of_the_blend_is_taken_as_it_is(tmp_path, chosen, tokenizer):
    train = write_rows(tmp_path / "train.jsonl", [marked(number) for number in range(30)])
    valid = write_rows(tmp_path / "valid.jsonl", [marked(number) for number in range(30, 40)])
    blend = {"train": blend_of(train)["datasets"], "valid": blend_of(valid)["datasets"]}
    prepare(blend, tmp_path / "out", **chosen | {"holdout": {"valid": 0.4, "test": 0.4}})
    assert sorted(numbers_in(sequences_of(tmp_path / "out"), tokenizer)) == list(range(30))
    assert sorted(numbers_in(sequences_of(tmp_path / "out", "valid"), tokenizer)) == list(range(30, 40))
    assert not files_of(tmp_path / "out", "test")


# What a shard refuses to vouch for.


def test_worker_with_different_template_does_not_pack(tmp_path, chosen):
    planned = plan(blend_of(write_rows(tmp_path / "some.jsonl", [marked(1)])), tmp_path / "out", **chosen)
    [shard], store, arguments = planned.plan.pending, planned.plan.store, SFT.stages[0].arguments(planned)
    other = TokenizerSource(model=str(chat_vocabulary(tmp_path / "other", size=501))).model_dump()
    with pytest.raises(RunError, match=r"^tokenizer\.model: .* on this worker but .* in the plan"):
        build_sft_shard(shard, store, **arguments | {"tokenizer": other})
    with pytest.raises(RunError, match=r"^chat_template: .* on this worker but .* in the plan"):
        build_sft_shard(shard, store, **arguments | {"template": arguments["template"] + " "})
    assert not list((tmp_path / "out").rglob("receipt.json"))


def test_an_id_that_the_vocabulary_does_not_have_stops_the_shard(tmp_path, chosen):
    """A recipe of fewer ids than the tokenizer has stands for files that do not fit together."""
    planned = plan(blend_of(write_rows(tmp_path / "some.jsonl", [marked(1)])), tmp_path / "out", **chosen)
    [shard] = planned.plan.pending
    shard = replace(shard, identity={**shard.identity, "recipe": {**shard.identity["recipe"], "vocabulary_size": 499}})
    with pytest.raises(RunError, match="id 499 is outside the vocabulary of 499 ids"):
        build(planned, [shard])
    assert not list((tmp_path / "out").rglob("receipt.json"))


def test_messages_that_the_data_skips_are_counted_and_not_trained_on(tmp_path, chosen, tokenizer):
    flags = [
        {"weight": 0},
        {"train": False},
        {"step_loss_mask": 0},
        {"train_detail": [{"begin_offset": 0, "end_offset": 0, "train": True}]},
    ]
    plain = [talk(user("Q?"), assistant("A."), user("R?"), assistant("B.")) for _ in flags]
    flagged = [talk(user("Q?"), {**assistant("A."), **flag}, user("R?"), assistant("B.")) for flag in flags]
    source = write_rows(tmp_path / "some.jsonl", flagged)
    _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
    assert sum(shard["facts"]["flagged_messages"] for shard in manifest["shards"]) == len(flags)
    found = sorted(sequences_of(tmp_path / "out"), key=lambda sequence: sequence.document)
    assert [list(sequence.ids) for sequence in found] == [whole(tokenizer, record)[0] for record in plain]
    said = [
        [tokenizer.decode([token for token, learned in zip(each.ids[1:], each.mask[:-1], strict=True) if learned])]
        for each in found
    ]
    assert said == [["B.<|im_end|>"]] * 3 + [["A<|im_end|>B.<|im_end|>"]]


@pytest.mark.slow
def test_megatron_bridge_itself_reads_the_packs_and_collates_them_as_is_assumed_here(tmp_path, chosen):
    conversations = [talk(user("Q " * number), assistant("A " * (40 - number))) for number in range(1, 30)]
    source = write_rows(tmp_path / "some.jsonl", conversations)
    prepare(blend_of(source), tmp_path / "out", **chosen | {"pack_size": 256})
    peers, script = Path(sys.prefix) / "peers", "tests.peers.bridge_in_turn"
    pattern = str(tmp_path / "out/splits/train/*.parquet")
    done = subprocess.run(
        [sys.executable, "-m", script, peers, pattern, "256", "0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    packs, found = packs_of(tmp_path / "out"), json.loads(done.stdout)
    assert len(found) == len(packs) > 1
    for pack, batch in zip(packs, found, strict=True):
        ours = collate(pack, 256, 0)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert batch[name][0] == getattr(ours, name).tolist(), name


def test_unread_fields_are_counted_and_kept_by_reuse(tmp_path, chosen):
    """In receipts, totals by dataset, the JSON record, the terminal, and on the page; in the second run as in the first."""
    rows = [talk(user("Q?"), assistant("A.")) | {"prompt": "Q?"} for _ in range(3)]
    rows += [{"prompt": "Q?", "response": "A.", "answer": None, "chosen": "A."}]
    source = write_rows(tmp_path / "some.jsonl", rows)
    for _ in range(2):
        _, manifest = prepare(blend_of(source), tmp_path / "out", **chosen)
        assert sum((Counter(shard["facts"].get("not_read", {})) for shard in manifest["shards"]), Counter()) == {
            "prompt": 3,
            "chosen": 1,
        }
        (name,) = manifest["totals"]["datasets"]
        assert manifest["totals"]["not_read"] == {name: {"chosen": 1, "prompt": 3}}
        assert artifact_record(manifest, "out")["sft"]["not_read"] == manifest["totals"]["not_read"]
        line = "not read: chosen (1 row), prompt (3 rows)"
        assert line in markdown(manifest, "out")
        shown = io.StringIO()
        print_summary(manifest, "out", Console(file=shown, width=200))
        assert line in shown.getvalue()
    leave_report(str(tmp_path / "out"), print)
    assert line in (tmp_path / "out/report.html").read_text("utf-8")


# Shards built with programs are those built without them, also when a program turns out to be wrong.


PROGRAMMED = [
    talk(*([system("Be brief.")] if number % 3 else []), user(f"{number}?"), thinking(f"Is it {number}?", f" {number}!\n"))
    if number % 2
    else talk(user(f"What is {number}?"), assistant(f"It is {number}."), user("Sure?"), assistant("</think>" if number % 8 else "Yes."))
    for number in range(400)
]  # fmt: skip


def built(folder, vocabulary, name):
    source = write_rows(folder / "rows.jsonl", PROGRAMMED)
    prepare(blend_of(source), folder / name, tokenizer={"model": str(vocabulary)}, pack_size=512)
    files = sorted(path for path in Path(folder / name / "shards").rglob("*") if path.is_file())
    return {path.relative_to(folder / name): path.read_bytes() for path in files if path.suffix != ".json"}


def without_programs(self, conversation):
    return self.renderer.sequences(conversation)


def test_a_shard_is_the_same_with_and_without_programs(tmp_path, vocabulary, monkeypatch):
    filled = []
    original = programs.Program.filled
    monkeypatch.setattr(programs.Program, "filled", lambda self, texts: filled.append(1) or original(self, texts))
    ours = built(tmp_path, vocabulary, "ours")
    assert len(filled) > 100
    monkeypatch.setattr(Programs, "sequences", without_programs)
    assert ours == built(tmp_path, vocabulary, "rendered")


def test_wrong_program_is_detected_and_not_used(tmp_path, vocabulary, monkeypatch, caplog):
    original, calls = programs.Program.filled, []

    def wrong(self, texts):
        calls.append(1)
        return original(self, texts if len(calls) < 20 else ["wrong"] * len(texts))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(programs.Program, "filled", wrong)
        patched.setattr(programs, "ONE_IN", 5)
        ours = built(tmp_path, vocabulary, "ours")
    assert "the whole shard is rendered instead" in caplog.text
    monkeypatch.setattr(Programs, "sequences", without_programs)
    assert ours == built(tmp_path, vocabulary, "rendered")
