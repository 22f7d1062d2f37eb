"""Launchers: start a job on this machine, by Slurm, on Kubernetes, or hand it to a different trainer.

Each is a function from a job to files and a command, without side effects. `local`, `slurm` and `kubernetes` start tokenmill's
trainer, which is watched; `megatron-lm`, `megatron-bridge` and `nemo-rl` write the files that those trainers need.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.job import JOB, Job
from tokenmill.tasks.train.settings import Launcher

from .launch import Launch
from .megatron import megatron_bridge_launch, megatron_lm_launch
from .own import kubernetes_launch, local_launch, slurm_launch

LAUNCHERS: Mapping[Launcher, Callable[[Job, int], Launch]] = {
    "local": local_launch,
    "slurm": slurm_launch,
    "kubernetes": kubernetes_launch,
    "megatron-lm": megatron_lm_launch,
    "megatron-bridge": megatron_bridge_launch,
}


def launch_of(job: Job, processes: int) -> Launch:
    """Return the launch of a job by its launcher, with `processes` per machine; job.json is among the files.

    Raises InputError for a job that the launcher can't run, or an environment that lacks its requirements.
    """
    if job.settings.launcher == "nemo-rl":
        raise InputError(
            f"launcher=nemo-rl: {job.data.path} holds {job.data.kind} data, but NeMo-RL takes preparations of `tokenmill rl`; "
            "choose a different launcher"
        )
    launch = LAUNCHERS[job.settings.launcher](job, processes)
    text = orjson.dumps(job.model_dump(), option=orjson.OPT_INDENT_2).decode()
    return replace(launch, files={JOB: text, **launch.files})
