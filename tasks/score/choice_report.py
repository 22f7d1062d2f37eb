"""What was chosen and why, as plain JSON and in words: clusters, quotas, data sets, and pairs that are nearly the same."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from .choose import Choice, quotas

MOST_LISTED = 50
"""Clusters and pairs that the text lists; the JSON has all clusters."""

MARKUP = re.compile(r"[\\`*_|<>\[\]]")


def choice_facts(choice: Choice, names: pa.Table, quota: int | None) -> dict[str, Any]:
    """The report as plain JSON. `names` are the rows' `row_id`, `dataset` and `split`; `quota` is the most of a cluster."""
    facts, sizes = choice.facts(), choice.clusters.sizes
    ids = names["row_id"]
    shares = quotas(np.zeros_like(sizes), np.minimum(sizes, len(ids) if quota is None else quota), choice.budget)
    clusters = [
        {**_named(each, ids, ["typical_row"]), "quota": int(shares[each["cluster"]])} for each in facts["clusters"]
    ]
    left_out = {
        "near_duplicate": facts["near_duplicates"],
        "quota": facts["rows"] - facts["chosen"] - facts["near_duplicates"],
    }
    return {
        **{name: facts[name] for name in ("rows", "budget", "chosen", "seed", "threshold")},
        "most_of_a_cluster": quota,
        "left_out": left_out,
        "data_sets": _data_sets(choice, names),
        "clusters": clusters,
        "removed_pairs": [_named(each, ids, ["removed", "kept"]) for each in facts["removed_pairs"]],
    }


def _named(record: Mapping[str, Any], ids: pa.ChunkedArray, fields: Sequence[str]) -> dict[str, Any]:
    """The record with ids instead of the numbers of rows."""
    return {**record, **{name: ids[record[name]].as_py() for name in fields}}


def _data_sets(choice: Choice, names: pa.Table) -> list[dict[str, Any]]:
    """How many rows of each data set and split there are, and how many of them were chosen."""
    chosen = np.zeros(names.num_rows, np.int64)
    chosen[choice.rows] = 1
    table = names.select(["dataset", "split"]).append_column("chosen", pa.array(chosen))
    counted = table.group_by(["dataset", "split"], use_threads=False).aggregate([([], "count_all"), ("chosen", "sum")])
    return [
        {"dataset": each["dataset"], "split": each["split"], "rows": each["count_all"], "chosen": each["chosen_sum"]}
        for each in counted.sort_by(
            [("count_all", "descending"), ("dataset", "ascending"), ("split", "ascending")]
        ).to_pylist()
    ]


def choice_markdown(facts: Mapping[str, Any]) -> bytes:
    """The report in words."""
    return "".join(f"{line}\n" for line in _lines(facts)).encode()


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    left_out, clusters = facts["left_out"], facts["clusters"]
    yield f"# {facts['chosen']:,} of {facts['rows']:,} rows\n"
    yield (
        f"Asked for were {facts['budget']:,}. The rows fall into {len(clusters):,} clusters, and each gives as many as the others as far "
        f"as it has them{_most(facts)}; within a cluster chance decides, with the seed {facts['seed']}. A row is left out for "
        f"another one that was chosen where their cosine is {facts['threshold']} or more, and what a cluster cannot give so goes to "
        "the others.\n"
    )
    yield f"* near duplicates of a chosen row: {left_out['near_duplicate']:,}"
    yield f"* the cluster had given its share: {left_out['quota']:,}\n"
    yield from _table(
        "Data sets",
        ("data set", "split", "rows", "chosen", "share"),
        [
            (each["dataset"], each["split"], each["rows"], each["chosen"], each["chosen"] / each["rows"])
            for each in facts["data_sets"]
        ],
    )
    yield from _table(
        "Clusters",
        ("cluster", "rows", "quota", "chosen", "near duplicates", "most typical row"),
        [
            tuple(each[name] for name in ("cluster", "rows", "quota", "chosen", "near_duplicates", "typical_row"))
            for each in clusters
        ],
    )
    yield from _table(
        "Nearly the same",
        ("left out", "chosen", "cosine"),
        [(each["removed"], each["kept"], each["cosine"]) for each in facts["removed_pairs"]],
    )


def _most(facts: Mapping[str, Any]) -> str:
    most = facts["most_of_a_cluster"]
    return "" if most is None else f", but at most {most:,}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Iterable[object]]) -> Iterator[str]:
    """A table of Markdown, its first rows; nothing where there are none."""
    if not rows:
        return
    yield f"## {title}\n"
    for cells in (columns, ["---"] * len(columns), *rows[:MOST_LISTED]):
        yield f"| {' | '.join(map(_cell, cells))} |"
    more = len(rows) - MOST_LISTED
    yield f"\n… and {more:,} more\n" if more > 0 else ""


def _cell(value: object) -> str:
    """A cell; what the data says stays in it, and stays text."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(MARKUP.sub(r"\\\g<0>", str(value)).split())
