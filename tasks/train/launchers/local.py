"""On one machine: torchrun, with one process per GPU or as many as were asked for."""

import os
import sys

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import join
from tokenmill.tasks.train.job import JOB, Job

from .launch import Launch, local_folder
from .torchrun import TRAINER, on_one_machine

THREADS = "OMP_NUM_THREADS"


def local_launch(job: Job, processes: int) -> Launch:
    """Raises InputError for more than one machine, and when the output folder is not in a file system."""
    if job.settings.nodes > 1:
        raise InputError(
            f"nodes={job.settings.nodes}: launcher=local starts processes on this machine alone; set nodes=1, or "
            "launcher=slurm or launcher=kubernetes"
        )
    program = [*TRAINER, join(local_folder(job.output_dir, job.settings.launcher), JOB)]
    return Launch({}, [sys.executable, *on_one_machine(processes, program)], True, {THREADS: _threads(processes)})


def _threads(processes: int) -> str:
    """What each process computes with, unless the environment says so: its share of the cores.

    Without it every process takes all cores, and torchrun, to prevent that, gives each a single one.
    """
    return os.environ.get(THREADS) or str(max(1, len(os.sched_getaffinity(0)) // processes))
