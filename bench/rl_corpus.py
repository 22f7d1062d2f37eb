"""Rows for reinforcement learning to measure on: prompts of the corpus' text with what NeMo-Gym wants beside them.

A row is a request of one to three messages (lognormal, median 900 characters), the agent that plays it, and an answer
to check against. In `placeholders` one row in four names a question of a table instead, as the math questions of
published blends do; the table holds `QUESTIONS` questions, a hundred times each. The same corpus gives the same bytes.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bench.bench import Bench
from bench.chat_corpus import SHARE, Writer, tape, until, write
from bench.corpus import Corpus

Variant = Literal["plain", "placeholders"]
VARIANTS: tuple[Variant, ...] = ("plain", "placeholders")

TABLE = "questions"
QUESTIONS, TIMES = 2_000, 100
PLACEHOLDERS = 0.25
AGENT = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
TEMPLATE = {"prefix": "", "suffix": "Think first, and put the answer on the last line."}
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
    ]
)


def build(bench: Bench, variant: Variant) -> Corpus:
    """The rows of this run."""
    path, size = bench.folder / f"rl_{variant}.jsonl", int(bench.megabytes * 1_000_000 * SHARE)
    return write(path, until(size, _rows(bench, variant)))


def build_table(bench: Bench) -> Path:
    """The table that placeholders point into, in the shape of DAPO-Math-17k."""
    path = bench.folder / "rl_table.parquet"
    questions = [_question(number) for number in range(QUESTIONS)] * TIMES
    pq.write_table(pa.Table.from_pylist(questions, SCHEMA), path)
    return path


def _question(number: int) -> dict[str, Any]:
    asked = f"What is {number} times {number + 7}, divided by {number % 11 + 1}, rounded down?"
    content = f"Solve the problem step by step.\n\n{asked}\n\nRemember the answer."
    answer = str(number * (number + 7) // (number % 11 + 1))
    return {"prompt": [{"content": content, "role": "user"}], "reward_model": {"ground_truth": answer, "style": "rule"}}


def _rows(bench: Bench, variant: Variant) -> Iterator[bytes]:
    writer, random = Writer(tape(bench), "plain"), Random(0)
    share = PLACEHOLDERS if variant == "placeholders" else 0.0
    with suppress(EOFError):
        while True:
            row = _placeholder(random) if random.random() < share else _request(writer, random)
            yield orjson.dumps(row) + b"\n"


def _request(writer: Writer, random: Random) -> dict[str, Any]:
    texts = [writer.text() for _ in range(random.choice((1, 1, 2, 3)))]
    roles = ["system", "user", "user"][-len(texts) :]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return {
        "responses_create_params": {"input": messages, "parallel_tool_calls": False},
        "agent_ref": AGENT,
        "expected_answer": str(random.randrange(1000)),
        "uuid": f"{random.getrandbits(128):032x}",
    }


def _placeholder(random: Random) -> dict[str, Any]:
    return {
        "dataset": TABLE,
        "_hf_placeholder": {"row": random.randrange(QUESTIONS * TIMES), "question_template": TEMPLATE},
        "agent_ref": AGENT,
        "uuid": f"{random.getrandbits(128):032x}",
    }
