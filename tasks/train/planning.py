"""From a prepared folder and settings to the job that a trainer is started with."""

from pathlib import Path

from tokenmill.tasks.storage import ART, absolute

from .job import Job
from .prepared import prepared_data
from .settings import TrainSettings


def plan_training(path: str, settings: TrainSettings, output_dir: str) -> Job:
    """The job of training on the preparation in `path`; places of this machine are made absolute.

    Nothing is written or started, and `preflight.check` tells whether the job can be. Raises InputError when there is
    nothing in `path` that can be trained on.
    """
    if settings.start_from is not None:
        settings = settings.model_copy(update={"start_from": start_place(settings.start_from)})
    return Job(settings=settings, data=prepared_data(path), output_dir=absolute(output_dir))


def start_place(start_from: str) -> str:
    """Weights to begin with: the absolute path of a folder that is here or registered, or the name that the hub knows."""
    here = start_from.startswith(ART) or Path(start_from).expanduser().exists()
    return absolute(start_from) if here else start_from
