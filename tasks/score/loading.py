"""Models of `transformers`, loaded so that nothing of them is made up.

The library gives random numbers to weights that a checkpoint lacks, and says so in a warning: scores would be noise that
looks like scores. Here that is an error. No code of a model's repository is ever run, and no pickle is read.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError
from tokenmill.tasks.errors import InputError
from transformers import PreTrainedModel

from .device import chosen_device, chosen_dtype
from .weights import ModelFiles, Precision

UNUSED = ("pooler.",)
"""Weights that a checkpoint may lack, because what they compute is not read."""


def load(auto: Any, files: ModelFiles, device: str | None, precision: Precision | None) -> PreTrainedModel:  # noqa: ANN401 - transformers' Auto classes share no type
    """The model of `files`, made by one of the Auto classes, ready for inference.

    It passes through the memory of the machine on its way to a GPU. Raises InputError when the files are no such model,
    lack weights of it, or are written in a way that needs a package which is not installed.
    """
    chosen = chosen_device(device)
    try:
        model, notes = auto.from_pretrained(
            files.folder, dtype=chosen_dtype(precision, chosen), trust_remote_code=False, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except ImportError as error:
        raise InputError(
            f"model: {files.name!r} needs a package that is not installed here: {' '.join(str(error).split())}; install "
            "it, or all that models are known to need: pip install 'tokenmill[score]'"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model: {files.name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    missing = sorted(name for name in cast("Mapping[str, Any]", notes)["missing_keys"] if not name.startswith(UNUSED))
    if missing:
        raise InputError(
            f"model: {files.name!r} lacks {len(missing)} of the weights of a {type(model).__name__}, {missing[0]} among "
            "them; give a checkpoint of the whole model"
        )
    cast("torch.nn.Module", model).to(chosen)
    return cast("PreTrainedModel", model).eval()
