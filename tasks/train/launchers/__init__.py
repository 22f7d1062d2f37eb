"""Launchers: how a job is started on this machine, by Slurm, on Kubernetes, or by somebody else's trainer.

Each is a function from a job to the files and the command that start it, and touches nothing. `local`, `slurm` and
`kubernetes` start our trainer and are watched; `megatron-lm`, `megatron-bridge` and `nemo-rl` write what those need.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.job import JOB, Job
from tokenmill.tasks.train.settings import Launcher

from .kubernetes import kubernetes_launch
from .launch import Launch
from .local import local_launch
from .megatron_bridge import megatron_bridge_launch
from .megatron_lm import megatron_lm_launch
from .nemo_rl import nemo_rl_launch
from .slurm import slurm_launch

__all__ = ["Launch", "launch_of", "nemo_rl_launch"]


def _rl_only(job: Job, _: int) -> Launch:
    raise InputError(
        f"launcher=nemo-rl: {job.data.path} holds {job.data.kind} data, and NeMo-RL is handed preparations of `tokenmill rl`; choose "
        "another launcher"
    )


LAUNCHERS: Mapping[Launcher, Callable[[Job, int], Launch]] = {
    "local": local_launch,
    "slurm": slurm_launch,
    "kubernetes": kubernetes_launch,
    "megatron-lm": megatron_lm_launch,
    "megatron-bridge": megatron_bridge_launch,
    "nemo-rl": _rl_only,
}


def launch_of(job: Job, processes: int) -> Launch:
    """How the launcher that the job names starts it, with so many processes per machine; job.json is among the files.

    Raises InputError when the job is not one for that launcher, or when the environment lacks what it needs.
    """
    launch = LAUNCHERS[job.settings.launcher](job, processes)
    text = orjson.dumps(job.model_dump(), option=orjson.OPT_INDENT_2).decode()
    return replace(launch, files={JOB: text, **launch.files})
