"""An evaluation: one process of this machine, with all of its cores."""

import sys

from .launch import Launch

EVALUATOR = ("-m", "tokenmill.tasks.train.evaluator")


def evaluation_launch(request: str) -> Launch:
    """What evaluates the request in a file."""
    return Launch({}, [sys.executable, *EVALUATOR, request], runs=True)
