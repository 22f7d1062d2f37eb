"""Where a model runs and in which precision, and what else is worth a GPU."""

import numpy as np
import torch

from .choose import CELLS, Nearest
from .weights import Precision


def chosen_device(device: str | None) -> torch.device:
    """The device called `device`; without a name the GPU where there is one, and the CPU where not."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def chosen_dtype(precision: Precision | None, device: torch.device) -> torch.dtype:
    """The type of weights and hidden states; without a name bfloat16 on CUDA and float32 elsewhere."""
    wanted = precision or ("bfloat16" if device.type == "cuda" else "float32")
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def nearest_on(device: str | None = None) -> Nearest:
    """`choose.nearest_centres` on a GPU: float32, some thousand rows at a time. Ties fall as they do there, to the first."""
    chosen = chosen_device(device)

    @torch.inference_mode()
    def nearest(vectors: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        points = torch.from_numpy(centres).to(chosen)
        lengths = points.square().sum(dim=1)
        labels, distances = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
        size = max(1, CELLS // len(centres))
        for start in range(0, len(vectors), size):
            part = torch.from_numpy(vectors[start : start + size]).to(chosen)
            least, places = (lengths - 2 * part @ points.T).min(dim=1)
            labels[start : start + size] = places.cpu().numpy()
            distances[start : start + size] = (least + part.square().sum(dim=1)).clamp(min=0).cpu().numpy()
        return labels, distances

    return nearest
