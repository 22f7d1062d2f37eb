"""Training and evaluation: a preparation becomes a model, and a model becomes results.

train-model:     check ─► train (a process, watched and retried)
evaluate-model:  evaluate (a process)
"""

from typing import Any

from tokenmill.tasks.strict import Place
from tokenmill.tasks.train.evaluation_settings import EvaluateSettings
from tokenmill.tasks.train.settings import TrainSettings
from tokenmill.tasks.train.stage import checked_job, evaluate, evaluation_of, hand_over_rl, train_task

from .output_folder import publishing
from .prefect_server import flow

DEFAULT, DEFAULT_EVALUATION = TrainSettings(), EvaluateSettings()


@flow(name="train-model")
@publishing
def train_model(data: Place, output_dir: Place, settings: TrainSettings = DEFAULT) -> dict[str, Any]:
    """Train a model on a preparation, or hand it to another trainer.

    Args:
        data: The output folder of a preparation for pretraining or SFT, or, for launcher=nemo-rl, for RL.
        output_dir: Where job, checkpoints, metrics and model go.
        settings: What is trained, how and where.
    """
    if settings.launcher == "nemo-rl":
        return hand_over_rl(data, settings, output_dir)
    job = checked_job(data, settings, output_dir)
    return train_task(job)(job)


@flow(name="evaluate-model")
@publishing
def evaluate_model(
    training: Place, output_dir: Place, settings: EvaluateSettings = DEFAULT_EVALUATION
) -> dict[str, Any]:
    """Evaluate the model of a training on the documents that its data holds out.

    Args:
        training: The output folder of a training.
        output_dir: Where results.json and results.md go.
        settings: What is asked of the model.
    """
    return evaluate(evaluation_of(training, settings, output_dir))
