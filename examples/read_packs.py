"""Pack conversations, and read the packs as a PyTorch dataset."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import tokenmill as tm
import torch
from torch.utils.data import DataLoader, IterableDataset

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"It is {a + b}."},
        ]
    }
    for a in range(10)
    for b in range(10)
]


class Packs(IterableDataset):
    """The packs of a folder: input ids, labels (-100 isn't trained on) and position ids, each int64 [tokens]."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).glob("*.parquet"))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for path in self.paths:
            for batch in pq.ParquetFile(path).iter_batches(64, columns=["input_ids", "loss_mask", "seq_start_id"]):
                for pack in batch.to_pylist():
                    ids, mask = torch.tensor(pack["input_ids"]), torch.tensor(pack["loss_mask"])
                    labels = torch.full_like(ids, -100)
                    labels[1:] = torch.where(mask[:-1] == 1, ids[1:], -100)  # the mask belongs to the next token
                    starts = torch.tensor(pack["seq_start_id"])
                    positions = torch.arange(len(ids))
                    positions -= starts[torch.searchsorted(starts, positions, right=True) - 1]
                    yield {"input_ids": ids, "labels": labels, "position_ids": positions}


if __name__ == "__main__":
    tm.sft(CHATS, "packs", pack_size=1024, holdout={"valid": 0, "test": 0})
    for number, pack in enumerate(DataLoader(Packs("packs/splits/train"), batch_size=None), 1):
        trained = int((pack["labels"] != -100).sum())
        print(
            f"pack {number}: {len(pack['input_ids']):,} tokens, {trained:,} trained, longest sequence {int(pack['position_ids'].max()) + 1}"
        )
