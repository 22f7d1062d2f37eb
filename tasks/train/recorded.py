"""What other trainers have read, as `recorder` has recorded it."""

from pathlib import Path
from typing import Any

import orjson
from tokenmill.tasks.errors import InputError

from .reads import step_digest

READS = "reads-{rank:05d}.jsonl"


def recorded_reads(path: str, global_batch: int) -> dict[int, str]:
    """The digest of each step in the folder of a training, by the latest lines of its replicas.

    Raises InputError for a damaged line; one that a killed process has begun is left out.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(Path(path).glob("reads-*.jsonl")):
        lines = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            found = _parsed(line, f"{file}:{number}")
            steps.setdefault(found["step"], []).append(found)
    return {step: step_digest(_sums(lines, global_batch)) for step, lines in steps.items()}


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
        return {**found, "sums": tuple(found["sums"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{place}: damaged; remove this line") from error


def _sums(lines: list[dict[str, Any]], global_batch: int) -> list[tuple[int, int]]:
    """The sums of the latest replicas that together read a whole step."""
    chosen: dict[int, tuple[int, int]] = {}
    samples = 0
    for line in sorted(lines, key=lambda line: -line["time"]):
        if samples < global_batch and line["replica"] not in chosen:
            chosen[line["replica"]] = line["sums"]
            samples += line["samples"]
    return list(chosen.values())
