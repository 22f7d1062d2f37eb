"""The files that a selection publishes next to its rows.

OUT/pools/<pool>/part-00000-1a2b3c4d.parquet    the list of each pool's rows, or copies of them; no folder for an empty pool
OUT/pools.json                                  predicate, rows and tokens of each pool, and the rows that any two share
OUT/candidates/part-00000-1a2b3c4d.parquet      a text per row to embed
OUT/behaviours.md, behaviours.json              the behaviors of the candidates, and whether they have collapsed
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import orjson
from tokenmill.tasks.dedup.harmony_shard import Deduplicated
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.inventory import Counts, merged
from tokenmill.tasks.harmony.publication import Beside
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.plan import Finished
from tokenmill.tasks.shards.store import Store

from .collapse import Survey, collapse
from .planning import pools_of
from .pools import added
from .pools import manifest as pools_manifest
from .settings import SelectionChoices
from .shard import PART, SURVEY, pool_part

POOLS, BEHAVIOURS = "pools", "behaviours"


def beside(selected: Sequence[Finished], deduplicated: Deduplicated, choices: SelectionChoices, store: Store) -> Beside:
    """The shards of a selection, with their folders, reports, and the record of duplicates."""
    final = deduplicated.final
    pools = pools_of(choices)
    tallies = [item.receipt.facts["tally"] for item in selected if "tally" in item.receipt.facts]
    inputs = {item.key: output.xxh3_128 for item in final for output in item.receipt.outputs if output.path == FILE}
    found = collapse(surveyed(selected, store), choices.limits)
    listed = pools_manifest(pools, added(tallies, len(pools.pools)), inputs)
    documents = {
        f"{BEHAVIOURS}.json": _json({**found.facts, "problems": list(found.problems)}),
        f"{BEHAVIOURS}.md": found.markdown.encode(),
    }
    if pools.pools:
        documents[f"{POOLS}.json"] = _json(listed)
    folders = {pool_part(number): f"{POOLS}/{name}" for number, name in enumerate(pools.names)}
    header = {
        "dedup": dict(deduplicated.facts),
        "selection": {
            "pools": {name: {"rows": pool["rows"], "tokens": pool["tokens"]} for name, pool in listed["pools"].items()},
            "candidates": sum(item.receipt.documents for item in selected),
            "without_score": {
                place: sum(item.receipt.facts["without_score"][number] for item in selected)
                for number, place in enumerate(choices.scores)
            },
            "collapsed": list(found.problems) if choices.limits.structures or choices.limits.calls else [],
        },
    }
    return Beside(selected, {PART: PART, **folders}, deduplicated.files, documents, header)


def surveyed(selected: Sequence[Finished], store: Store) -> Counts:
    """The survey of all shards of a selection."""
    records = (orjson.loads(store.read(item.receipt, SURVEY)) for item in selected)
    return reduce(merged, records, Survey().record())


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


def require_variety(manifest: Mapping[str, Any], output_dir: str) -> None:
    """Raises RunError if the published behaviors have collapsed beyond the limits in the settings."""
    if problems := manifest["selection"]["collapsed"]:
        raise RunError(f"{output_dir}: published, but behaviors have collapsed: {'; '.join(problems)}")
