"""The arguments of torchrun, by which the processes of a training find each other.

One machine meets at its own address and whatever port is free: a fixed port is taken as soon as two trainings share a
machine, and looking the machine's name up fails on laptops and in containers that have none. Nothing is restarted here
(`--max-restarts=0`), because a whole run that goes on from its checkpoint is the one way of going on.
"""

from collections.abc import Sequence

RUN = ("-m", "torch.distributed.run")
"""What Python is told to run: `torchrun` itself may be another environment's."""

TRAINER = ("-m", "tokenmill.tasks.train.trainer")


def on_one_machine(processes: int, program: Sequence[str]) -> list[str]:
    """What follows `python` to run `program`, a script or `-m` and a module, in so many processes of this machine."""
    return [
        *RUN, "--nnodes=1", f"--nproc-per-node={processes}", "--max-restarts=0",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", *program,
    ]  # fmt: skip
