"""Blends of raw text in, training-ready token shards out.

From Python, a kind of preparation is a function, named as in its manifest:

    from tokenmill import pretrain

    record = pretrain("blends/tiny.json", "output/pretrain", shard_size="64MB")

It takes a blend (a path, a URI, or the JSON itself as a dict), an iterable of rows or a table (of pandas, polars, pyarrow, DuckDB,
`datasets`), and returns the artifact record. `open("output/pretrain")` reads an output: splits, documents, packs, rows and the
source of each. `dataframe("output/pretrain", "documents")` gives the results back as pandas. `__init__.pyi` has the signatures.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["dataframe", "dedup", "embeddings", "filter", "harmony", "nll", "open", "pretrain", "rl", "sft"]  # pyright: ignore[reportUnsupportedDunderAll] - see __getattr__


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Callable[..., Any]:
    """The function of a kind of preparation, or `dataframe`; what it needs is imported when it is asked for."""
    if name.startswith("_"):
        raise AttributeError(name)
    if name == "dataframe":
        from tokenmill.tasks.report.dataframe import dataframe

        return dataframe
    if name == "open":
        from tokenmill.tasks.dataset.dataset import open_dataset

        return open_dataset
    from tokenmill.tasks.shards.kinds import KINDS

    if name not in KINDS:
        raise AttributeError(f"module 'tokenmill' doesn't have an attribute {name!r}")
    from tokenmill.flows.options import be_quiet

    be_quiet()  # before Prefect is imported and reads its settings
    from tokenmill.flows.from_python import function_of

    return function_of(name)
