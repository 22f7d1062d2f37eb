"""Completion NLL as a script does it: batches in the order of the file, padded, and the logits of every position."""

import numpy as np
import torch


@torch.inference_mode()
def sums(model, sequences, batch_size):
    """The NLL of each sequence's scored tokens, in nats, float64."""
    found = []
    device = model.device
    for first in range(0, len(sequences.offsets) - 1, batch_size):
        bounds = sequences.offsets[first : first + batch_size + 1]
        lengths = np.diff(bounds)
        places = np.arange(int(lengths.max())) < lengths[:, None]
        ids, wanted = np.zeros(places.shape, np.int64), np.zeros(places.shape, np.float32)
        ids[places] = sequences.ids[bounds[0] : bounds[-1]]
        wanted[places] = sequences.loss[bounds[0] : bounds[-1]]
        ids, wanted, mask = (torch.from_numpy(each).to(device) for each in (ids, wanted, places))
        logits = model(ids, attention_mask=mask.long(), use_cache=False).logits
        likely = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        found.append(-(likely * wanted[:, 1:]).sum(dim=1).double().cpu().numpy())
    return np.concatenate(found)
