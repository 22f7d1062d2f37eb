"""The evaluator: `python -m tokenmill.tasks.train.evaluator REQUEST.json`, a process of its own, so that what it holds of a GPU is
given back when it ends.
"""

import sys
import time
from pathlib import Path

import orjson
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.strict import parse

from .evaluate import evaluate
from .evaluation import Evaluation
from .events import Failed, tell
from .orphans import die_with_parent
from .results import publish_results


def run(asked: Evaluation) -> None:
    """Evaluate and publish the results. Raises InputError and RunError as `evaluate` does."""
    began = time.perf_counter()
    results = evaluate(asked.model, asked.data, asked.settings)
    publish_results(results, asked.output_dir, {"seconds": time.perf_counter() - began})


def main() -> int:
    """Do what the file that is named asks for, and return the exit code."""
    die_with_parent()
    try:
        run(parse(Evaluation, orjson.loads(Path(sys.argv[1]).read_bytes()), sys.argv[1]))
    except (InputError, RunError) as error:
        tell(Failed(reason=str(error), wrong_call=isinstance(error, InputError)))
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
