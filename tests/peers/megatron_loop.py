"""The peer: the loop that Megatron-LM's `tools/preprocess_data.py` runs, with its own builder and one worker.

A line at a time: `json.loads`, encode one text with Hugging Face `tokenizers`, append the end-of-document id, hand the
list of ids to megatron-core's `IndexedDatasetBuilder`, and write the index at the end. It is written to favour the
peer: the tokenizer is called without the transformers layer that Megatron puts around it, and in this process instead
of a pool of one, so that no ids are pickled across a pipe. Its time is the tokenizer's: 2 to 4 MB/s on one core.

    python -m tests.peers.megatron_loop CORPUS TOKENIZER_JSON EOD_ID OUT_PREFIX [--literal]

`--literal` reads control strings in the text as ordinary text; without it they become control ids, as in Megatron.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path
from tokenizers import Tokenizer


def preprocess(lines: Iterable[str | bytes], tokenizer: Tokenizer, eod: int, prefix: str, vocabulary_size: int) -> None:
    """Write `prefix.bin` and `prefix.idx` from JSON lines with a `text`, as Megatron does with `--append-eod`.

    A text without tokens becomes a document without a sequence and without an end-of-document id. Ids are stored as
    uint16 below 65,500 ids, else int32. A line that is not JSON, or has no text, raises: Megatron's run ends there too.
    """
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=DType.optimal_dtype(vocabulary_size))
    for line in lines:
        ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        lengths = []
        if ids:
            ids.append(eod)
            lengths.append(len(ids))
        builder.add_document(ids, lengths)  # pyright: ignore[reportArgumentType] - Megatron hands it a list, too
    builder.finalize(get_idx_path(prefix))


def main() -> None:
    """Prepare one file, with the arguments of the module's docstring."""
    corpus, tokenizer_json, eod, prefix, *options = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_json)
    tokenizer.encode_special_tokens = "--literal" in options
    with Path(corpus).open(encoding="utf-8") as lines:
        preprocess(lines, tokenizer, int(eod), prefix, tokenizer.get_vocab_size(with_added_tokens=True))


if __name__ == "__main__":
    main()
