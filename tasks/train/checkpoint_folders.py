"""Where checkpoints are, and what was told before each: what can be known of them without torch.

    OUT/checkpoints/step_00000012/…                 the engine's state, in its own format
    OUT/checkpoints/step_00000012/checkpoint.json   sealed: step, number of processes, the steps since the checkpoint before,
                                                    and the xxh3_128 of every other file of the checkpoint

No format of checkpoints has checksums of its own, and a flipped bit in a weight trains on without a word. So training
goes on only from a checkpoint whose files have the hashes that were recorded; that costs one read of them.

What a trainer tells is kept by who watches it. Whoever watches can be killed in the moment between a checkpoint and the
writing down of the steps that led to it, which are never done again; so they stand in the checkpoint too.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.published import file_hash
from tokenmill.tasks.strict import parse

from .events import Event, Step, Validated
from .job import CHECKPOINTS

NAME = re.compile(r"step_(\d{8,})")
FACTS = "checkpoint.json"
DAMAGED = "damaged; remove this checkpoint's folder to go on from the one before"


def steps_in(output_dir: str) -> list[int]:
    """The steps that there are checkpoints of, in order."""
    folder = Path(output_dir, CHECKPOINTS)
    found = [NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def folder_of(output_dir: str, step: int) -> str:
    """Where the checkpoint of a step is."""
    return f"{output_dir}/{CHECKPOINTS}/step_{step:08d}"


def write_facts(folder: str, step: int, processes: int, told: Iterable[Event]) -> None:
    """Write what is known of a checkpoint into its folder, which holds everything else.

    Of what was `told`, steps and their losses are kept.
    """
    events = [event.model_dump() for event in told if isinstance(event, Step | Validated)]
    facts = {"step": step, "processes": processes, "events": events, "files": _hashes(folder), "volatile": {}}
    publish_bytes(f"{folder}/{FACTS}", sealed(facts))


def require_whole(folder: str) -> None:
    """Raises InputError unless every file of a checkpoint is what it was when the checkpoint was written."""
    recorded, found = _facts(f"{folder}/{FACTS}")["files"], _hashes(folder)
    for name in sorted(recorded.keys() | found.keys()):
        if recorded.get(name) != found.get(name):
            raise InputError(f"{folder}/{name}: {DAMAGED}")


def _hashes(folder: str) -> dict[str, str]:
    """The xxh3_128 of every file below a folder but FACTS, by its path there."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): file_hash(str(path)) for path in files}
    return {name: content for name, content in found.items() if name != FACTS}


def _facts(place: str) -> dict[str, Any]:
    try:
        return unsealed(Path(place).read_bytes())
    except (ValueError, OSError) as error:
        raise InputError(f"{place}: {DAMAGED}") from error


def told_before(output_dir: str) -> Sequence[Step | Validated]:
    """What was told before each checkpoint that is there, since the one before it. Raises InputError for a damaged file."""
    return [event for step in steps_in(output_dir) for event in _told(f"{folder_of(output_dir, step)}/{FACTS}")]


def _told(place: str) -> list[Step | Validated]:
    events = _facts(place)["events"]
    return [parse(Step if event["event"] == "step" else Validated, event, place) for event in events]
