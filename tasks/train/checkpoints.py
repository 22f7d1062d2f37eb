"""Checkpoints: folders that are whole or not there, the newest of which is where training goes on.

    OUT/checkpoints/step_00000012/…            the engine's state, in its own format
    OUT/checkpoints/step_00000012/checkpoint.json

All processes write into one hidden folder, which takes its name when the last is done.
"""

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import orjson

from tasks.shards.publish import publish_bytes, publish_folder, sweep_folders
from tasks.train.engine import Engine
from tasks.train.job import CHECKPOINTS
from tasks.train.world import World

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


def save(engine: Engine, world: World, output_dir: str, step: int, keep: int) -> str:
    """Write the checkpoint of a step, and remove all but the newest `keep`; its folder. Raises OSError."""
    folder = folder_of(output_dir, step)
    with ExitStack() as stack:
        place = world.agreed(stack.enter_context(publish_folder(folder)) if world.first else None)
        engine.save(place)
        if world.first:
            publish_bytes(f"{place}/{FACTS}", orjson.dumps({"step": step, "processes": world.size}))
        world.wait()
    world.wait()
    if world.first:
        for old in steps_in(output_dir)[:-keep]:
            shutil.rmtree(folder_of(output_dir, old))
    return folder


def resume(engine: Engine, world: World, output_dir: str) -> int:
    """Take up the newest checkpoint; its step, 0 where there is none."""
    if world.first:
        sweep_folders(f"{output_dir}/{CHECKPOINTS}")
    newest = int(world.agreed(str((steps_in(output_dir) or [0])[-1]) if world.first else None))
    if newest:
        engine.load(folder_of(output_dir, newest))
    return newest
