"""What a selection publishes beside the rows it was made from.

OUT/pools/<pool>/part-00000-1a2b3c4d.parquet    the rows of each pool, as they stand in the data; nothing for an empty one
OUT/pools.json                                  each pool with predicate, rows and tokens, and what any two share
OUT/candidates/part-00000-1a2b3c4d.parquet      a text per row to embed
OUT/behaviours.md, behaviours.json              what the candidates do, and whether that has collapsed
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from tokenmill.tasks.dedup.harmony_shard import Deduplicated
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.publication import Beside
from tokenmill.tasks.harmony.shard import FILE
from tokenmill.tasks.shards.manifest import Finished
from tokenmill.tasks.shards.store import Store

from .collapse import Survey, collapse
from .planning import pools_of
from .pools import Tally
from .pools import manifest as pools_manifest
from .settings import SelectionChoices
from .shard import PART, SURVEY, pool_part

POOLS, BEHAVIOURS = "pools", "behaviours"


def beside(selected: Sequence[Finished], deduplicated: Deduplicated, choices: SelectionChoices, store: Store) -> Beside:
    """The shards of a selection, made from the final ones, with their folders and reports, and who went for whom."""
    final = deduplicated.final
    pools = pools_of(choices)
    counts = sum(
        (Tally.of_record(item.receipt.facts["tally"]) for item in selected if "tally" in item.receipt.facts),
        Tally.none(len(pools.pools)),
    )
    inputs = {item.key: output.xxh3_128 for item in final for output in item.receipt.outputs if output.path == FILE}
    found = collapse(surveyed(selected, store), choices.limits)
    listed = pools_manifest(pools, counts, inputs)
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
            "without_score": _without_score(selected, choices.scores),
            "collapsed": list(found.problems) if choices.limits.structures or choices.limits.calls else [],
        },
    }
    return Beside(selected, {PART: PART, **folders}, deduplicated.files, documents, header)


def _without_score(selected: Sequence[Finished], scores: Sequence[str]) -> dict[str, int]:
    """How many rows have no score of each folder."""
    return {
        place: sum(item.receipt.facts["without_score"][number] for item in selected)
        for number, place in enumerate(scores)
    }


def surveyed(selected: Sequence[Finished], store: Store) -> Survey:
    """The survey of all shards of a selection."""
    records = (orjson.loads(store.read(item.receipt, SURVEY)) for item in selected)
    return sum(map(Survey.of_record, records), Survey())


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


def require_variety(manifest: Mapping[str, Any], output_dir: str) -> None:
    """Raises RunError where the behaviours of what was published have collapsed, beyond the limits that were asked for."""
    if problems := manifest["selection"]["collapsed"]:
        raise RunError(f"{output_dir}: published, but behaviours have collapsed: {'; '.join(problems)}")
