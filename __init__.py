"""Blends of raw text in, training-ready token shards out.

From Python, a preparation kind is a function, named as in its manifest:

    from tokenmill import pretrain

    record = pretrain("blends/tiny.json", "output/pretrain", shard_size="64MB")

It takes a blend (a path, a URI, or the JSON itself as a dict), an iterable of rows or a table (of pandas, polars, pyarrow, DuckDB,
`datasets`), and returns the artifact record. `open("output/pretrain")` reads an output: splits, documents, packs, rows and the
source of each. `dataframe("output/pretrain", "documents")` gives the results back as pandas. `__init__.pyi` has the signatures.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

ELSEWHERE = {
    "InputError": "errors.InputError",
    "RunError": "errors.RunError",
    "dataframe": "report.dataframe.dataframe",
    "open": "dataset.dataset.open_dataset",
}
"""Names that aren't preparations, and their modules in `tokenmill.tasks`."""

# fmt: off
__all__ = ["InputError", "RunError", "dataframe", "dedup", "embeddings", "filter", "harmony", "nll", "open", "pretrain", "rl", "sft"]  # pyright: ignore[reportUnsupportedDunderAll] - see __getattr__
# fmt: on


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a preparation's function, or a name from `ELSEWHERE`, and import its dependencies only then."""
    if name.startswith("_"):
        raise AttributeError(name)
    if name in ELSEWHERE:
        module, _, attribute = ELSEWHERE[name].rpartition(".")
        return getattr(import_module(f"tokenmill.tasks.{module}"), attribute)
    from tokenmill.tasks.shards.kinds import KINDS

    if name not in KINDS:
        raise AttributeError(f"module 'tokenmill' doesn't have an attribute {name!r}")
    from tokenmill.flows.options import be_quiet

    be_quiet()  # before Prefect is imported and reads its settings
    from tokenmill.flows.from_python import function_of

    return function_of(name)
