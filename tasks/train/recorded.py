"""What other trainers have read, as `recorder` has recorded it."""

from pathlib import Path
from typing import Any

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish_bytes

from .reads import step_digest

READS = "reads-{rank:05d}.jsonl"


def remove_torn_line(log: Path) -> None:
    """Remove a line that a killed process has begun, or the next line would go on in it. Raises OSError."""
    content = log.read_bytes() if log.exists() else b""
    if not content.endswith(b"\n") and content:
        publish_bytes(str(log), content[: content.rfind(b"\n") + 1])


SKIPPED = "skipped"
"""In place of the digest of a step that the trainer has left out."""


def recorded_reads(path: str, global_batch: int) -> dict[int, str]:
    """The digest of each step that all replicas have recorded in the folder of a training, by their latest lines, or SKIPPED.

    Raises InputError for a damaged line, and if no step is whole. A line that a killed process has begun is left out.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(Path(path).glob("reads-*.jsonl")):
        lines = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            found = _parsed(line, f"{file}:{number}")
            steps.setdefault(found["step"], []).append(found)
    sums = {step: _sums(lines, global_batch) for step, lines in steps.items()}
    whole = {step: SKIPPED if None in parts else step_digest(parts) for step, parts in sums.items() if parts}
    if steps and not whole:
        raise InputError(
            f"{path}: no step of {global_batch} samples is recorded whole; each data-parallel replica writes its own "
            "reads-RANK.jsonl: copy those of all machines into this folder"
        )
    return whole


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
        return {**found, "sums": found["sums"] and tuple(found["sums"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{place}: damaged; remove this line") from error


def _sums(lines: list[dict[str, Any]], global_batch: int) -> list[Any]:
    """The sums of the latest replicas that together read a whole step, None of those that left it out; empty if none have yet."""
    runs: dict[int, dict[int, tuple[int, int] | None]] = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        replicas = runs.pop(line["samples"], {})
        runs[line["samples"]] = {**replicas, line["replica"]: line["sums"]}
    whole = (own for samples, own in reversed(runs.items()) if samples * len(own) == global_batch)
    return list(next(whole, {}).values())
