"""Where checkpoints are, and what was told before each: what can be known of them without torch.

    OUT/checkpoints/step_00000012/…                 the engine's state, in its own format
    OUT/checkpoints/step_00000012/checkpoint.json   step, number of processes, and the steps since the checkpoint before

What a trainer tells is kept by who watches it. Whoever watches can be killed in the moment between a checkpoint and the
writing down of the steps that led to it, which are never done again; so they stand in the checkpoint too.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import orjson

from tasks.errors import InputError
from tasks.shards.publish import publish_bytes
from tasks.strict import parse
from tasks.train.events import Event, Step, Validated
from tasks.train.job import CHECKPOINTS

NAME = re.compile(r"step_(\d{8,})")
FACTS = "checkpoint.json"


def steps_in(output_dir: str) -> list[int]:
    """The steps that there are checkpoints of, in order."""
    folder = Path(output_dir, CHECKPOINTS)
    found = [NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def folder_of(output_dir: str, step: int) -> str:
    """Where the checkpoint of a step is."""
    return f"{output_dir}/{CHECKPOINTS}/step_{step:08d}"


def write_facts(folder: str, step: int, processes: int, told: Iterable[Event]) -> None:
    """Write what is known of a checkpoint into its folder; of what was `told`, steps and their losses are kept."""
    events = [event.model_dump() for event in told if isinstance(event, Step | Validated)]
    publish_bytes(f"{folder}/{FACTS}", orjson.dumps({"step": step, "processes": processes, "events": events}))


def told_before(output_dir: str) -> Sequence[Step | Validated]:
    """What was told before each checkpoint that is there, since the one before it. Raises InputError for a damaged file."""
    return [event for step in steps_in(output_dir) for event in _told(f"{folder_of(output_dir, step)}/{FACTS}")]


def _told(place: str) -> list[Step | Validated]:
    try:
        events = orjson.loads(Path(place).read_bytes())["events"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{place}: damaged; remove this checkpoint's folder, to go on from the one before") from error
    return [parse(Step if event["event"] == "step" else Validated, event, place) for event in events]
