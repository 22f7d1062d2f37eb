"""Megatron-LM on a CPU: put this folder first on PYTHONPATH, and each Python process answers for CUDA as far as it needs.

`tokenmill.tasks.train.cuda_on_cpu` handles tensors, streams and devices; here are triton, which Megatron-LM imports and never
runs without a GPU, CUDA's random numbers, and figures that it prints.
"""

import os
import sys
import typing
from collections import defaultdict

import torch
import torch._inductor.compile_fx
import typing_extensions
from tokenmill.tasks.train.cuda_on_cpu import compute_on_cpu

from tests.peers.megatron_in_turn import Absent

if "RANK" in os.environ:
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override
    sys.meta_path.insert(0, Absent(["triton"]))
    compute_on_cpu()
    properties = type("Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 1, "total_memory": 1 << 34})
    answers = {
        "is_available": True, "set_device": None, "device_count": 1, "is_initialized": True, "get_device_name": "cpu",
        "get_device_properties": properties, "get_device_capability": (9, 0), "memory_stats": {}, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None,
        "mem_get_info": (1 << 33, 1 << 34), "manual_seed": None, "manual_seed_all": None, "ipc_collect": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.default_generators = defaultdict(lambda: torch.default_generator)
    torch.compile = lambda function=None, **_: function or (lambda each: each)
