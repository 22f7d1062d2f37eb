"""Launchers: start a job on this machine, by Slurm, on Kubernetes, or hand it to another trainer.

Each is a function from a job to files and a command, without side effects. `local`, `slurm` and `kubernetes` start tokenmill's
trainer, which is watched; `megatron-lm`, `megatron-bridge` and `nemo-rl` write what those trainers need.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import join
from tokenmill.tasks.train.job import JOB, Job
from tokenmill.tasks.train.settings import Launcher

from .kubernetes import kubernetes_launch
from .launch import TRAINER, Launch, local_folder, on_one_machine
from .megatron_bridge import megatron_bridge_launch
from .megatron_lm import megatron_lm_launch
from .slurm import slurm_launch

THREADS = "OMP_NUM_THREADS"


def local_launch(job: Job, processes: int) -> Launch:
    """Start torchrun here. Raises InputError for several machines, and for an output folder outside a file system.

    Processes share the cores evenly unless the environment sets their threads: by default each would take all cores, and under
    torchrun a single one.
    """
    if job.settings.nodes > 1:
        raise InputError(
            f"nodes={job.settings.nodes}: launcher=local starts processes on this machine only; set nodes=1, or "
            "launcher=slurm or launcher=kubernetes"
        )
    program = [*TRAINER, join(local_folder(job.output_dir, job.settings.launcher), JOB)]
    threads = os.environ.get(THREADS) or str(max(1, len(os.sched_getaffinity(0)) // processes))
    return Launch({}, [sys.executable, *on_one_machine(processes, program)], True, {THREADS: threads})


def evaluation_launch(request: str) -> Launch:
    """Evaluate the request in a file, in one process of this machine with all of its cores."""
    return Launch({}, [sys.executable, "-m", "tokenmill.tasks.train.evaluate", request], runs=True)


LAUNCHERS: Mapping[Launcher, Callable[[Job, int], Launch]] = {
    "local": local_launch,
    "slurm": slurm_launch,
    "kubernetes": kubernetes_launch,
    "megatron-lm": megatron_lm_launch,
    "megatron-bridge": megatron_bridge_launch,
}


def launch_of(job: Job, processes: int) -> Launch:
    """The launch of a job by its launcher, with `processes` per machine; job.json is among the files.

    Raises InputError for a job that the launcher cannot run, or an environment that lacks what it needs.
    """
    if job.settings.launcher == "nemo-rl":
        raise InputError(
            f"launcher=nemo-rl: {job.data.path} holds {job.data.kind} data, but NeMo-RL takes preparations of `tokenmill rl`; "
            "choose another launcher"
        )
    launch = LAUNCHERS[job.settings.launcher](job, processes)
    text = orjson.dumps(job.model_dump(), option=orjson.OPT_INDENT_2).decode()
    return replace(launch, files={JOB: text, **launch.files})
