"""Load models of `transformers` so that every weight comes from the checkpoint.

The library initializes missing weights at random and only warns; scores would be noise. Here missing weights are an error. Code
from a model's repository is never run, and pickles are never read.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError
from tokenmill.tasks.errors import InputError
from transformers import PreTrainedModel

from .settings import Precision
from .weights import ModelFiles

UNUSED = ("pooler.",)
"""Weights that may be missing, because their output is unused."""


def load(auto: Any, files: ModelFiles, device: str | None, precision: Precision | None) -> PreTrainedModel:  # noqa: ANN401 - transformers' Auto classes share no type
    """Load the model in `files` with one of the Auto classes, ready for inference.

    By default it runs on a GPU in bfloat16 if there is one, otherwise in float32. Weights pass through main memory on their way
    to a GPU. Raises InputError if the files are not such a model, lack weights, or need a package that is not installed.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = precision or ("bfloat16" if chosen.type == "cuda" else "float32")
    try:
        model, notes = auto.from_pretrained(
            files.folder, dtype=getattr(torch, wanted), trust_remote_code=False, local_files_only=True,
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
