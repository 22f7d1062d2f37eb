"""Training and evaluation: a preparation becomes a model, and a model becomes results.

train-model:     check ─► train (a process, watched and retried)
evaluate-model:  evaluate (a process)
"""

from typing import Any

from prefect import flow

from flows.lost_runs import alone_in
from tasks.train.evaluation_settings import EvaluateSettings
from tasks.train.settings import TrainSettings
from tasks.train.stage import checked_job, evaluate, evaluation_of, hand_over_rl, train_task

DEFAULT, DEFAULT_EVALUATION = TrainSettings(), EvaluateSettings()


@flow(name="train-model", persist_result=False)
def train_model(data: str, output_dir: str, settings: TrainSettings = DEFAULT) -> dict[str, Any]:
    """Train a model on a preparation, or hand it to another trainer.

    Args:
        data: The output folder of a preparation for pretraining or SFT, or, for launcher=nemo-rl, for RL.
        output_dir: Where job, checkpoints, metrics and model go.
        settings: What is trained, how and where.
    """
    if settings.launcher == "nemo-rl":
        return hand_over_rl(data, settings, output_dir)
    job = checked_job(data, settings, output_dir)
    with alone_in(job.output_dir):
        return train_task(job)(job)


@flow(name="evaluate-model", persist_result=False)
def evaluate_model(training: str, output_dir: str, settings: EvaluateSettings = DEFAULT_EVALUATION) -> dict[str, Any]:
    """Evaluate the model of a training on the documents that its data holds out.

    Args:
        training: The output folder of a training.
        output_dir: Where results.json and results.md go.
        settings: What is asked of the model.
    """
    asked = evaluation_of(training, settings, output_dir)
    with alone_in(asked.output_dir):
        return evaluate(asked)
