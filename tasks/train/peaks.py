"""What a device could do and what a model asks of it: the two sides of a model FLOPs utilisation (MFU).

Peaks are dense bfloat16 operations a second by NVIDIA's data sheets: A100 (312 TFLOPS), H100 (SXM 989, PCIe 756, NVL
835), H200 (SXM 989, NVL 835), L40 (181), L40S (362), L4 (121), and HGX B200 (2,250 per GPU). Where a sheet gives the
figure with 2:4 sparsity alone, it is halved here. A device that is not listed, and a slice of one (MIG), has no peak
rather than a guessed one, and no MFU.
"""

import re

from .settings import ModelSettings

PEAKS: dict[frozenset[str], float] = {
    frozenset({"A100"}): 312e12,
    frozenset({"H100"}): 989e12,
    frozenset({"H100", "PCIe"}): 756e12,
    frozenset({"H100", "NVL"}): 835e12,
    frozenset({"H200"}): 989e12,
    frozenset({"H200", "NVL"}): 835e12,
    frozenset({"L40"}): 181e12,
    frozenset({"L40S"}): 362e12,
    frozenset({"L4"}): 121e12,
    frozenset({"B200"}): 2250e12,
}
"""By the words that must all stand in the name that a driver gives a device; where several fit, the most words count."""

TIMES_FORWARD = 3
"""A backward pass costs two forward passes: one for the gradients of inputs, one for those of weights."""


def peak(device: str) -> float | None:
    """Dense bfloat16 operations a second of a device, by its name as `torch.cuda.get_device_name` gives it."""
    words = frozenset(re.split(r"[\s-]+", device))
    found = [wanted for wanted in PEAKS if wanted <= words]
    if "MIG" in words or not found:
        return None
    return PEAKS[max(found, key=len)]


def flops_per_token(model: ModelSettings, vocabulary: int, sequence_length: int) -> float:
    """Operations of training (forward and backward) per token of a row; a multiplication with its addition counts two.

    `vocabulary` are the rows of the output layer, `model.vocabulary(size)`. Counted are all products of matrices, and of
    attention what a causal model needs: the token at place t looks at t + 1 tokens, which is (sequence_length + 1) / 2 on
    average. (Some count the square in full: for 12 layers of 768 with rows of 2,048 tokens of a vocabulary of 50,000, that is a
    tenth more.) Rows of packs,
    whose sequences do not look at each other, need less than this. Norms, activations and rotary positions are left out,
    as is what is computed again to save memory.
    """
    head = model.hidden // model.heads
    projections = 2 * model.hidden * head * (model.heads + model.key_value_heads)
    attention = 2 * model.heads * head * (sequence_length + 1) / 2
    feed_forward = 3 * model.hidden * model.feed_forward
    forward = model.layers * (projections + attention + feed_forward) + model.hidden * vocabulary
    return TIMES_FORWARD * 2 * forward
