"""The trainer: `torchrun … -m tokenmill.tasks.train.trainer JOB.json`, one of the processes that train together.

It reports events (see `events`), and exits with 0, 1 for a failed run, or 2 for a job that must be changed. Slow imports are
inside functions: to write a checkpoint, megatron-core starts a process that imports this module again.
"""

import sys
import warnings

from .events import run_request
from .job import Job
from .orphans import die_with_parent


def main() -> int:
    """Run the job in the file that the command line names, and return the exit code."""
    die_with_parent()
    warnings.simplefilter("ignore")  # megatron-core warns about a dozen optional libraries
    from .training import run

    return run_request(Job, run)


if __name__ == "__mp_main__":  # megatron-core's process, which would outlive a killed trainer
    die_with_parent()
if __name__ == "__main__":
    sys.exit(main())
