"""Thousands of hostile rows for every target: what is kept is what the reader reads, in both directions.

Rows are good ones, up to four places of which say something else. The judge is the peer: NeMo-Gym's model of a request
built of OpenAI's own types, and what NeMo-RL does with a file of the one row. A row that the peer reads may be refused
for one reason only: it would be read as something else than it says, silently.
"""

import copy
import random
from collections import Counter
from importlib import resources

import orjson
import pyarrow as pa
import pytest
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.rl.targets import TARGETS
from tokenmill.tasks.rl.targets.nemo_gym import SCHEMAS

from tests.peers import nemo_gym_request
from tests.peers import nemo_rl_readers as readers
from tests.rl import test_targets as known

ROWS = 1_000
SEED = 16

MISREAD = {
    "nemo_rl_sft": {"empty_text", "two_forms", "reserved_field"},
    "nemo_rl_chat": set(),
    "nemo_rl_grpo_math": {"empty_text", "two_forms", "reserved_field", "system_turn", "not_a_pair", "bad_field", "missing_field", "no_messages", "unknown_role", "bad_message", "no_content", "not_text", "bad_tool_calls"},
    "nemo_rl_dpo": {"empty_text", "no_messages", "last_not_assistant", "bad_rank", "reserved_field", "bad_field", "same_answers"},
    "nemo_gym": {"reserved_field", "unresolved_placeholder"},
}  # fmt: skip
"""The reasons for which a row is refused that the reader would read, in another sense than it has. (pyarrow reads the first
null among completions as the completion behind it.)"""

CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "4", "annotations": []}],
}
BASES = {target: [row for of, row, *_ in known.GOOD if of == target] for target in MISREAD} | {
    "nemo_gym": [row for row, _ in known.GYM_ROWS] + [
        known.request(known.S, known.Q, OUTPUT, known.Q, tools=[known.GYM_TOOL], tool_choice={"type": "function", "name": "add"}),
        known.request(known.Q, CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": "4"}, reasoning={"effort": "low"}),
        known.request(known.Q, {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]}, known.Q, metadata={"a": "b"}, text={"format": {"type": "text"}}),
        known.request({"role": "user", "content": [{"type": "input_text", "text": "q"}, {"type": "input_image", "detail": "auto", "image_url": "https://x/y.png"}]}, truncation="auto", store=False, user="u"),
        known.request(known.Q | {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [0.5]}, include=["reasoning.encrypted_content"]),
        known.request({"type": "mcp_list_tools", "tools": [{"x": 1}]}, {"type": "mcp_call", "arguments": "{}", "name": "n"}, tools=[{"type": "mcp", "server_label": "s", "allowed_tools": ["a"]}]),
    ],
}  # fmt: skip

VALUES = [
    None, "", "a", "4", " ", 0, 1, 7, -1, 1.0, 0.5, True, False, [], {}, ["a"], [None], [{}], {"a": 1}, {"a": "b"}, [1, "a"],
    "user", "assistant", "auto", "message", "function_call", "output_text", "input_text", "yes", "1", 10**30, "é\u2028",
    known.Q, known.A, [known.Q], [known.A], [known.Q, known.A], known.TOOL, [known.TOOL], [known.GYM_TOOL], known.GYM_TOOL,
    OUTPUT, CALL_ITEM, [{"type": "output_text", "text": "x"}], [{"type": "input_text", "text": "x"}],
    [{"type": "input_video", "video": "v"}], {"type": "function", "name": "add"}, known.CALLED, [known.CALL],
]  # fmt: skip
KEYS = [
    "input", "output", "messages", "tools", "task_name", "chosen", "rejected", "prompt", "context", "completions", "content", "role",
    "type", "rank", "completion", "tool_calls", "name", "parameters", "strict", "arguments", "call_id", "id", "status", "metadata",
    "instructions", "tool_choice", "reasoning", "parallel_tool_calls", "text", "top_p", "temperature", "max_output_tokens", "stream",
    "model", "seed", "license", "agent_ref", "prompt_token_ids", "routed_experts", "summary", "encrypted_content", "annotations",
    "function", "format", "truncation", "include", "store", "user", "service_tier", "background", "prompt", "max_tokens", "_rowidx",
]  # fmt: skip


def hostile(target, seed):
    """Rows for a target, the same ones for a seed."""
    draw, made = random.Random(seed), 0
    while made < ROWS:
        row = copy.deepcopy(draw.choice(BASES[target]))
        for _ in range(draw.choice([0, 1, 1, 1, 2, 4])):
            spoil(row, draw)
        if target == "nemo_gym" or is_a_table(row):
            made += 1
            yield row


def is_a_table(row):
    """Whether columns can hold the row; one with an array of several types is for the file to be judged by, not for it."""
    try:
        readers.load([row])
    except (pa.ArrowInvalid, SystemError):
        return False
    return True


def spoil(row, draw):
    places = known.places(row)
    if not places:
        return
    inside, key = draw.choice(places)
    change = draw.random()
    if change < 0.25:
        del inside[key]
    elif change < 0.55 and isinstance(inside, dict):
        inside[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
    elif isinstance(inside, list) and change < 0.65:
        inside.append(copy.deepcopy(draw.choice(VALUES)))
    else:
        inside[key] = copy.deepcopy(draw.choice(VALUES))


def reads(target, row):
    try:
        readers_of = known.READERS[target]([copy.deepcopy(row)])
    except (*readers.FAILURES, AttributeError, OverflowError):
        return False
    return len(readers_of) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", MISREAD)
def test_kept_rows_are_readable_and_errors_include_location_and_fix(target):
    check, found = TARGETS[target].check, Counter()
    for row in hostile(target, SEED):
        rejected, read = check(row), reads(target, row)
        if isinstance(rejected, Rejected):
            assert ";" in rejected.detail, rejected
            assert "typed-dict" not in rejected.detail
            assert "literal[" not in rejected.detail
        if rejected is None:
            assert read, row
            assert all(isinstance(text, str) for text in TARGETS[target].texts(row))
        elif read:
            assert rejected.reason in MISREAD[target], (rejected, row)
        found[rejected is None, read] += 1
    assert sum(found.values()) == ROWS
    assert found[True, True] > ROWS / 10
    assert found[False, False] > ROWS / 10


def test_the_schema_is_made_of_openais_types():
    """`python -m tests.peers.nemo_gym_request > tasks/rl/targets/nemo_gym_request.json` writes it."""
    assert (
        orjson.loads(resources.files("tokenmill.tasks.rl.targets").joinpath(SCHEMAS).read_bytes())
        == nemo_gym_request.schemas()
    )
