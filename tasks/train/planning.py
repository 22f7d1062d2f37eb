"""From a prepared folder and settings to the job that a trainer is started with."""

from pathlib import Path

from tasks.storage import absolute
from tasks.train.job import Job
from tasks.train.prepared import prepared_data
from tasks.train.settings import TrainSettings


def plan_training(path: str, settings: TrainSettings, output_dir: str) -> Job:
    """The job of training on the preparation in `path`; places of this machine are made absolute.

    Nothing is written or started, and `preflight.check` tells whether the job can be. Raises InputError when there is
    nothing in `path` that can be trained on.
    """
    start = settings.start_from
    if start is not None and Path(start).expanduser().exists():
        settings = settings.model_copy(update={"start_from": absolute(start)})
    return Job(settings=settings, data=prepared_data(path), output_dir=absolute(output_dir))
