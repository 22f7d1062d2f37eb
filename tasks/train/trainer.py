"""The trainer: `torchrun … -m tokenmill.tasks.train.trainer JOB.json`, one process of those that train together.

It tells what it does as lines of JSON (see `events`), and ends with exit code 0, 1 for a run that failed, and 2 for a job
that has to be mended first.

Nothing heavy is imported at the top: to write a checkpoint, megatron-core starts a process that imports this module again,
which would take 6 s each time.
"""

import sys
import warnings
from pathlib import Path

import orjson
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.strict import parse

from .events import Failed, tell
from .job import Job
from .orphans import die_with_parent


def main() -> int:
    """Run the job in the file that is named, and return the exit code."""
    die_with_parent()
    warnings.simplefilter("ignore")  # megatron-core warns a dozen times of libraries that it can do without
    from .training import run

    try:
        run(parse(Job, orjson.loads(Path(sys.argv[1]).read_bytes()), sys.argv[1]))
    except (InputError, RunError) as error:
        tell(Failed(reason=str(error), wrong_call=isinstance(error, InputError)))
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__mp_main__":  # the process of megatron-core, which would live on when this one is killed
    die_with_parent()
if __name__ == "__main__":
    sys.exit(main())
