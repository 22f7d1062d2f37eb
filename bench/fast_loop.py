"""The peer of today: the steps of Megatron-LM's `tools/preprocess_data_fast.py` (August 2026), in one process.

It loads the tokenizer with transformers' `AutoTokenizer`, lets gigatoken read and encode the whole file on all cores, inserts
the end-of-document ids with NumPy, and writes a million documents at a time. It is written to favor the peer: neither torch nor
megatron-core is imported, which takes the script some seconds, and the index is written by NumPy from arrays.

The whole file and its ids are in memory. A line that isn't JSON ends gigatoken's reading without an error.

    python -m bench.fast_loop CORPUS TOKENIZER_FOLDER EOD_ID OUT_PREFIX
"""

import struct
import sys
from pathlib import Path
from typing import Any

import awkward
import gigatoken
import numpy as np
from transformers import AutoTokenizer

CHUNK = 1_000_000
"""Documents of one write."""

UINT16_VOCABULARY = 65_500
"""Megatron stores the ids of smaller vocabularies in two bytes."""


def preprocess(corpus: str, folder: str, eod: int, prefix: Path) -> None:
    """Write `prefix.bin` and `prefix.idx` of a file of JSON lines with a `text`."""
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    code, dtype = (8, np.uint16) if len(loaded) < UINT16_VOCABULARY else (4, np.int32)
    source: Any = gigatoken.JsonlFileSource([corpus], field="text")
    documents: Any = gigatoken.Tokenizer(loaded).encode_files(source, parallel=True)
    lengths: list[np.ndarray] = []
    with prefix.with_suffix(".bin").open("wb") as stream:
        for start in range(0, len(documents), CHUNK):
            chunk = documents[start : start + CHUNK]
            flat = np.asarray(awkward.flatten(chunk), dtype)
            counts = np.asarray(awkward.num(chunk, axis=1))
            flat = np.insert(flat, np.cumsum(counts), eod).astype(dtype, copy=False)
            lengths.append(counts + 1)
            stream.write(flat.tobytes())
    _write_index(prefix.with_suffix(".idx"), np.concatenate(lengths).astype(np.int32), code, np.dtype(dtype).itemsize)


def _write_index(path: Path, lengths: np.ndarray, code: int, itemsize: int) -> None:
    with path.open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1))
        stream.write(lengths.tobytes())
        stream.write(((np.cumsum(lengths, dtype=np.int64) - lengths) * itemsize).tobytes())
        stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


if __name__ == "__main__":
    corpus, folder, eod, prefix = sys.argv[1:]
    preprocess(corpus, folder, int(eod), Path(prefix))
