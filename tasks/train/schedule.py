"""The learning rate of each step: linear growth, then a decay over the steps that are left."""

import math

from .settings import OptimizerSettings


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """The rate of step `step` of `steps`, counted from 1. The highest is reached with the last step of the warm-up."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    if settings.decay == "constant":
        return settings.learning_rate
    share = 1 - done if settings.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.minimum_learning_rate + share * (settings.learning_rate - settings.minimum_learning_rate)
