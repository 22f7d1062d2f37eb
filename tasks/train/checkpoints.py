"""Checkpoints: training resumes from the newest, which is either complete or absent.

    OUT/checkpoints/step_00000012/…                 the engine's state, in its own format
    OUT/checkpoints/step_00000012/checkpoint.json   sealed: step, number of processes, events since the last checkpoint,
                                                    and the xxh3_128 of every other file

All processes write into one hidden folder, which is renamed when the last is done. No checkpoint format has checksums, and
a flipped bit in a weight would go unnoticed, so training resumes only after all files have been hashed. The events are kept
here too, because the process that records them can be killed before it has written them.
"""

import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.manifest import file_hash
from tokenmill.tasks.shards.publish import publish_bytes, publish_folder, sweep_folders
from tokenmill.tasks.strict import parse

from .events import Event, TrainStep, Validated
from .job import CHECKPOINTS

if TYPE_CHECKING:  # the process that watches a training must not import torch
    from .engine import World
    from .megatron import MegatronEngine

NAME = re.compile(r"step_(\d{8,})")
FACTS = "checkpoint.json"
DAMAGED = "damaged; remove this checkpoint's folder to resume from the previous one"


def save(
    engine: "MegatronEngine", world: "World", output_dir: str, step: int, keep: int, events: Sequence[Event] = ()
) -> str:
    """Write the checkpoint of a step, remove all but the newest `keep`, and return its folder. Raises OSError.

    `events` are the first process's since the last checkpoint.
    """
    folder = folder_of(output_dir, step)
    with ExitStack() as stack:
        place = world.broadcast(stack.enter_context(publish_folder(folder)) if world.first else None)
        engine.save(place)
        world.wait()
        if world.first:
            write_facts(place, step, world.size, events)
        world.wait()
    world.wait()
    if world.first:
        for old in steps_in(output_dir)[:-keep]:
            shutil.rmtree(folder_of(output_dir, old))
    return folder


def resume(engine: "MegatronEngine", world: "World", output_dir: str) -> int:
    """Load the newest checkpoint and return its step, 0 if there is none. Raises InputError for a damaged one."""
    if world.first:
        sweep_folders(f"{output_dir}/{CHECKPOINTS}")
    newest = int(world.broadcast(str((steps_in(output_dir) or [0])[-1]) if world.first else None))
    if newest and world.first:
        require_whole(folder_of(output_dir, newest))
    if newest:
        engine.load(folder_of(output_dir, newest))
    return newest


def steps_in(output_dir: str) -> list[int]:
    """Return the steps of all checkpoints, in order."""
    folder = Path(output_dir, CHECKPOINTS)
    found = [NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def folder_of(output_dir: str, step: int) -> str:
    """Return the folder of a step's checkpoint."""
    return f"{output_dir}/{CHECKPOINTS}/step_{step:08d}"


def write_facts(folder: str, step: int, processes: int, events: Iterable[Event]) -> None:
    """Write checkpoint.json last, with the hashes of all other files and the losses in `events`."""
    kept = [event.model_dump() for event in events if isinstance(event, TrainStep | Validated)]
    facts = {"step": step, "processes": processes, "events": kept, "files": _hashes(folder), "volatile": {}}
    publish_bytes(f"{folder}/{FACTS}", sealed(facts))


def require_whole(folder: str) -> None:
    """Raises InputError unless every file of a checkpoint has its recorded hash."""
    recorded, found = _facts(f"{folder}/{FACTS}")["files"], _hashes(folder)
    for name in sorted(recorded.keys() | found.keys()):
        if recorded.get(name) != found.get(name):
            raise InputError(f"{folder}/{name}: {DAMAGED}")


def _hashes(folder: str) -> dict[str, str]:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): file_hash(str(path)) for path in files}
    return {name: content for name, content in found.items() if name != FACTS}


def _facts(place: str) -> dict[str, Any]:
    try:
        return unsealed(Path(place).read_bytes())
    except (ValueError, OSError) as error:
        raise InputError(f"{place}: {DAMAGED}") from error


def saved_events(output_dir: str) -> list[TrainStep | Validated]:
    """Return the losses recorded in all checkpoints. Raises InputError for a damaged file."""
    places = [f"{folder_of(output_dir, step)}/{FACTS}" for step in steps_in(output_dir)]
    recorded = [(event, place) for place in places for event in _facts(place)["events"]]
    return [parse(TrainStep if event["event"] == "step" else Validated, event, place) for event, place in recorded]
