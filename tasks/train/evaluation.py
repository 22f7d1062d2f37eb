"""What is to be evaluated, as the one JSON file that an evaluator is started with."""

from pydantic import Field
from tokenmill.tasks.strict import Strict

from .evaluation_settings import EvaluateSettings
from .job import TrainData

REQUEST = "request.json"
EVALUATION_LOG = "evaluation.log"


class Evaluation(Strict, frozen=True):
    """A model to be evaluated: its folder, the data whose held-out documents it is asked about, and where results go."""

    model: str = Field(min_length=1)
    data: TrainData
    settings: EvaluateSettings
    output_dir: str = Field(min_length=1)
