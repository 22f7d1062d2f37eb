"""Whether a preparation accounts for every row of a file: what the tortures of rows and of Parquet check.

The judge is NumPy, which reads the published tokens, and a tokenizer of which every text comes back from its ids.
"""

import atexit
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.preparing import blend_of, documents_of, prepare
from tests.tokenize.small_vocabularies import byte_level_bpe, reference

EMPTY = ("text", "")

_FOLDERS = ExitStack()
atexit.register(_FOLDERS.close)

Verdict = tuple[str, str] | str
"""What a row holds: `("text", it)`, the reason why it has none, or `blank`."""


def assert_conserved(path: Path, verdicts: Sequence[Verdict], text_field: str, shard_size: int) -> None:
    """Prepare the file in its folder. Raises AssertionError unless each row is the document, or the drop, that it should be."""
    folder = path.parent
    blend = blend_of(path)
    blend["datasets"][0]["text_field"] = text_field
    with patch.dict("os.environ", {"XDG_CACHE_HOME": _model()}):
        _, manifest = prepare(
            blend, folder / "out", tokenizer={"model": _model()}, shard_size=shard_size, max_bad_row_fraction=1.0,
            holdout={"valid": 0, "test": 0}, allow_shrink=["rows", "array"],
        )  # fmt: skip
    texts = [verdict[1] for verdict in verdicts if isinstance(verdict, tuple) and verdict != EMPTY]
    assert documents_of(folder / "out", reference(Path(_model()))) == texts
    bad = [
        (line, verdict) for line, verdict in enumerate(verdicts, 1) if isinstance(verdict, str) and verdict != "blank"
    ]
    assert _rejected(folder / "out") == bad
    dropped = Counter(reason for _, reason in bad)
    dropped += Counter(blank_line=[*verdicts].count("blank"), empty_document=[*verdicts].count(EMPTY))
    assert manifest["totals"]["dropped"] == dropped
    assert manifest["totals"]["rows"] == len(verdicts) == len(texts) + dropped.total()


def _rejected(output: Path) -> list[tuple[int, str]]:
    """Line and reason of every row in the quarantine."""
    files = sorted((output / "quarantine").glob("*")) if (output / "quarantine").exists() else []
    rows = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
    return [(row["line"], row["reason"]) for row in rows]


@cache
def _model() -> str:
    """A small vocabulary, made once in each process."""
    folder = Path(_FOLDERS.enter_context(TemporaryDirectory()))
    return str(byte_level_bpe(folder))
