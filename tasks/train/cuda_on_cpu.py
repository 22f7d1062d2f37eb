"""Let megatron-core train on a machine without a GPU.

megatron-core asks for the current CUDA device, creates tensors with `device="cuda"`, moves them by `.cuda()`, and checks
that gradients are `torch.cuda.FloatTensor`. Without CUDA, this module makes the CPU handle all of these. That covers its
models, optimizers, schedules and checkpoints with the backend gloo, from version 0.16.1 up to 0.20, so a rehearsal on a CPU
runs the code of the GPU. CUDA's random numbers are not replaced: only dropout in megatron-core's own attention would use them,
and `TorchAttention` replaces that.

The change affects the whole process, so only a trainer may make it, because it is a separate process, and never with a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

CPU = torch.device("cpu")


class CudaToCpu(torch.overrides.TorchFunctionMode):
    """Within this context, the CPU handles requests for CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(named.get("device")):
            named["device"] = CPU
        if func is torch.Tensor.to:
            args = [CPU if _is_cuda(each) else each for each in args]
        return func(*args, **named)


def _is_cuda(place: object) -> bool:
    return isinstance(place, str | torch.device) and str(place).startswith("cuda")


class CpuStream:
    """A stream that works synchronously. A class, because modules imported later may use it as a type."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _stream: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


def compute_on_cpu() -> None:
    """Replace CUDA with the CPU for the rest of this process."""
    CudaToCpu().__enter__()
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": CpuStream,
        "current_stream": CpuStream,
        "default_stream": CpuStream,
        "stream": lambda *_: nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
