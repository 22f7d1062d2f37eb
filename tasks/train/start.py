"""Where weights to begin with come from."""

from pathlib import Path

from tokenmill.tasks.score.weights import find_model

from .job import JOB, MODEL


def model_name(place: str) -> str:
    """What other libraries know a model by: its folder in that of a training, or `place` itself."""
    training = Path(place).expanduser()
    return str(training / MODEL) if (training / JOB).is_file() else place


def start_folder(name: str) -> Path:
    """The folder of a model: that of an earlier training, a folder of one's own, or one fetched from the hub.

    Raises InputError when there is none.
    """
    return find_model(model_name(name)).folder
