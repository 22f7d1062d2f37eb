"""Where weights to begin with come from."""

from pathlib import Path

from tasks.score.weights import find_model
from tasks.train.job import JOB, MODEL


def start_folder(name: str) -> Path:
    """The folder of a model: that of an earlier training, a folder of one's own, or one fetched from the hub.

    Raises InputError when there is none.
    """
    training = Path(name).expanduser()
    return find_model(str(training / MODEL) if (training / JOB).is_file() else name).folder
