"""Processes wait for one that works alone for as long as it takes, and for all else as long as they did."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tokenmill.tasks.train.engine import PATIENCE, joined
from torch import distributed
from torch.distributed import distributed_c10d

from tests.train.training_runs import started

CPU = torch.device("cpu")


def timeout(group):
    return group._get_backend(CPU).options._timeout  # noqa: SLF001 - torch tells it nowhere else


def test_only_waiting_takes_longer():
    with joined("cpu") as world:
        assert timeout(world.patient) == PATIENCE == timedelta(days=1)
        assert timeout(distributed.group.WORLD) == distributed_c10d.default_pg_timeout < PATIENCE


@pytest.mark.slow
def test_a_process_is_waited_for_though_it_takes_longer_than_all_processes_may_take_together(tmp_path):
    with started([__file__, str(tmp_path)], processes=2) as running:
        running.communicate()
    assert running.returncode == 0, "a process failed; see its traceback on stderr"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def work_alone_for_longer_than_a_timeout(folder):
    """The first process works until something that all would have to do together has timed out."""
    with joined("cpu") as world:
        distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # noqa: SLF001
        world.wait()
        if world.first:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                distributed.barrier()
        world.wait()
        Path(folder, str(world.rank)).touch()


if __name__ == "__main__":
    import sys

    work_alone_for_longer_than_a_timeout(sys.argv[1])
