"""A preparation's output as a pandas DataFrame: its documents, its packs, or its shards.

All of it is in memory: 8 bytes a token and more. Of large outputs read the files themselves, or look at some rows with `view`.
"""

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from tokenmill.tasks.dataset.dataset import open_dataset
from tokenmill.tasks.dataset.parts import ShardPart, parts_of
from tokenmill.tasks.dataset.stored import PADDING
from tokenmill.tasks.errors import InputError, nearest, pip_install

if TYPE_CHECKING:
    from pandas import DataFrame

Rows = Literal["documents", "packs", "shards"]

SHARD_COLUMNS = ("dataset", "split", "key", "file", "start", "stop", "rows", "quarantined", "truncated")


def dataframe(output_dir: str | PathLike[str], rows: Rows = "documents") -> "DataFrame":
    """Return the results of a preparation of documents or conversations, with a row for each of its documents, packs or shards.

    Documents: dataset, split, id (as in `view`), file, line, input_ids, text, and for packs also trained (bool): the tokens that
    the loss is computed on. Packs: dataset, split, input_ids, trained, and the starts and ids of their documents. Raises
    InputError for anything else, without pandas, and for an empty output; RunError for a damaged file.
    """
    if rows not in get_args(Rows):
        raise InputError(f"rows: {rows!r} isn't known; {nearest(str(rows), get_args(Rows))}")
    try:  # an extra, which takes half a second to import
        from pandas import DataFrame
    except ImportError as error:
        raise InputError(f"dataframe needs pandas; install it with: {pip_install('pandas')}") from error
    data = open_dataset(output_dir)
    if rows == "shards":
        sums = [
            {name: sum(entry[name].values()) for name in ("documents", "tokens", "drops")} for entry in data.entries
        ]
        facts = [{name: entry.get(name) for name in SHARD_COLUMNS} for entry in data.entries]
        return DataFrame([own | counts for own, counts in zip(facts, sums, strict=True)])
    if data.kind.tokens is None:
        raise InputError(f"{data.path}: holds {data.type}, which has shards only; pretrain and sft have documents")
    parts = parts_of(data.manifest, None)
    if rows == "documents":
        decode = data.tokenizer.decode
        found = ({**document, "text": decode(document["input_ids"].tolist())} for document in _documents(parts))
        return DataFrame(found)
    if not parts[0].packed:
        raise InputError(f"{data.path}: holds documents, which aren't packed; ask for 'documents'")
    return DataFrame(
        {
            "dataset": part.dataset, "split": part.split, "input_ids": row.ids, "trained": row.trained,
            "starts": row.starts, "ids": [part.document(number) for number in row.documents.tolist()],
        }
        for part in parts for row in part.all_rows
    )  # fmt: skip


def _documents(parts: list[ShardPart]) -> Iterator[dict[str, Any]]:
    for part in parts:
        for row in part.all_rows:
            kept = np.array(row.role_names)[row.roles] != PADDING
            stops = [*row.starts[1:].tolist(), len(row.ids)]
            for number, start, stop in zip(row.documents.tolist(), row.starts.tolist(), stops, strict=True):
                origin, line = part.source(number)
                tokens = np.flatnonzero(kept[start:stop]) + start  # padding is part of the sequence before it
                yield {
                    "dataset": part.dataset, "split": part.split, "id": part.document(number), "file": origin.file,
                    "line": line, "input_ids": row.ids[tokens],
                    **({"trained": row.trained[tokens]} if part.packed else {}),
                }  # fmt: skip
