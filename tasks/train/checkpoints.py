"""Checkpoints: folders that are whole or not there, the newest of which is where training goes on.

All processes write into one hidden folder, which takes its name when the last is done (`checkpoint_folders` says where).
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack

from tokenmill.tasks.shards.publish import publish_folder, sweep_folders

from .checkpoint_folders import folder_of, require_whole, steps_in, write_facts
from .engine import Engine
from .events import Event
from .job import CHECKPOINTS
from .world import World


def save(engine: Engine, world: World, output_dir: str, step: int, keep: int, told: Sequence[Event] = ()) -> str:
    """Write the checkpoint of a step, and remove all but the newest `keep`; its folder. Raises OSError.

    `told` is what the first process has told since the checkpoint before.
    """
    folder = folder_of(output_dir, step)
    with ExitStack() as stack:
        place = world.agreed(stack.enter_context(publish_folder(folder)) if world.first else None)
        engine.save(place)
        world.wait()
        if world.first:
            write_facts(place, step, world.size, told)
        world.wait()
    world.wait()
    if world.first:
        for old in steps_in(output_dir)[:-keep]:
            shutil.rmtree(folder_of(output_dir, old))
    return folder


def resume(engine: Engine, world: World, output_dir: str) -> int:
    """Take up the newest checkpoint; its step, 0 where there is none. Raises InputError for a damaged one."""
    if world.first:
        sweep_folders(f"{output_dir}/{CHECKPOINTS}")
    newest = int(world.agreed(str((steps_in(output_dir) or [0])[-1]) if world.first else None))
    if newest and world.first:
        require_whole(folder_of(output_dir, newest))
    if newest:
        engine.load(folder_of(output_dir, newest))
    return newest
