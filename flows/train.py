"""Train a model on a preparation, and evaluate it.

train-model:     check ─► train (a process, watched and retried)
evaluate-model:  evaluate (a process)
"""

from typing import Any

from tokenmill.tasks.strict import Place
from tokenmill.tasks.train.settings import EvaluateSettings, TrainSettings
from tokenmill.tasks.train.stage import checked_job, evaluate, evaluation_of, hand_over_rl, train

from .prefect_server import flow

DEFAULT, DEFAULT_EVALUATION = TrainSettings(), EvaluateSettings()


@flow(name="train-model")
def train_model(data: Place, output_dir: Place, settings: TrainSettings = DEFAULT) -> dict[str, Any]:
    """Train a model on a preparation, or hand it to a different trainer.

    Args:
        data: The output folder of a preparation for pretraining or SFT, or, for launcher=nemo-rl, for RL.
        output_dir: Folder for job, checkpoints, metrics and model.
        settings: Model, optimizer, hardware and launcher.
    """
    if settings.launcher == "nemo-rl":
        return hand_over_rl(data, settings, output_dir)
    job = checked_job(data, settings, output_dir)
    return train.with_options(retries=job.settings.retries)(job)


@flow(name="evaluate-model")
def evaluate_model(
    training: Place, output_dir: Place, settings: EvaluateSettings = DEFAULT_EVALUATION
) -> dict[str, Any]:
    """Evaluate the model of a training run on its held-out documents.

    Args:
        training: The output folder of a training run.
        output_dir: Folder for results.json and results.md.
        settings: Settings of the evaluation.
    """
    return evaluate(evaluation_of(training, settings, output_dir))
