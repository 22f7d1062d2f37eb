"""Turn questions into rows for NeMo-Gym, and see why the others are rejected."""

import json
from pathlib import Path

import tokenmill as tm

QUESTIONS = [
    {"question": "What is 2 + 3?", "answer": "5"},
    {"question": "", "answer": "42"},
    {"question": "What is 7 * 6?", "answer": "42"},
]


def request(row: dict) -> dict:
    """The row as NeMo-Gym reads it: a request, the agent that runs it, and what its verifier needs."""
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": row["question"]}] if row["question"] else None
        },
        "agent_ref": {"type": "responses_api_agents", "name": "math"},
        "expected_answer": row["answer"],
    }


if __name__ == "__main__":
    nothing = {"valid": 0, "test": 0}
    record = tm.rl(map(request, QUESTIONS), "out", target="nemo_gym", holdout=nothing)["rl"]
    print(record["documents"], "rows are ready;", "dropped:", record["dropped"])
    for path in Path("out/quarantine").rglob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            bad = json.loads(line)
            print(f"{Path(bad['file']).name}:{bad['line']}: {bad['reason']}: {bad['detail']}")
