"""The manifest: one JSON file that says what a preparation is made of, down to each shard.

It holds the blend, the choices, every shard with its source, identity and counts, the totals, and what could not be
vouched for, and size and hash of the other files of the output folder. All of it is the same on every run that prepares
the same thing; what is not (times, hosts, how much was reused, the seal over it all) stands under `volatile`. Recipes
are listed once and referred to by number, because a million shards share a few of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.storage import join

from .plan import PlannedShard
from .receipt import Receipt
from .store import read_bytes

MANIFEST = "manifest.json"
BLEND = "blend.json"

FAILED = "failed"
"""The `status` of the manifest that a failed run leaves where nothing was published before."""

WHOLE = "all"
"""The part of a shard of which nothing is held out; it belongs to the split that the blend names."""


SUMMED = ("rows", "documents", "tokens", "quarantined", "truncated", "source_bytes")
"""What is added up over shards."""

Names = Mapping[str, Mapping[str, Sequence[str]]]
"""The published names of shards by place and split. A name is the path of the one file of a part, or the prefix that
its files share; there are several where a shard is published more than once."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A planned shard, its key and the receipt that proves it."""

    shard: PlannedShard
    key: str
    receipt: Receipt

    @property
    def dataset(self) -> tuple[str, str]:
        """The data set it is of: the split of the plan, and the name."""
        return self.shard.split, self.shard.dataset

    def split_of(self, part: str) -> str:
        """The split that a part of the shard belongs to."""
        if part != WHOLE:
            return part
        return self.shard.split if self.shard.split in SPLITS else "train"


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as sealed JSON."""
    return sealed(manifest)


def read_manifest(output_dir: str) -> dict[str, Any] | None:
    """The manifest of an output folder, or None.

    Raises InputError when it is not one, or damaged, and RunError when it is that of a run that failed.
    """
    manifest = _manifest(output_dir)
    if manifest is not None and manifest.get("status") == FAILED:
        raise RunError(f"{join(output_dir, MANIFEST)}: the run failed and published nothing: {manifest['error']}")
    return manifest


def published_manifest(output_dir: str) -> dict[str, Any] | None:
    """The manifest of what is published in an output folder, or None. Raises InputError as `read_manifest` does."""
    manifest = _manifest(output_dir)
    return None if manifest is not None and manifest.get("status") == FAILED else manifest


def _manifest(output_dir: str) -> dict[str, Any] | None:
    place = join(output_dir, MANIFEST)
    data = read_bytes(place)
    if data is None:
        return None
    try:
        manifest = unsealed(data)
    except ValueError as error:
        raise InputError(f"{place}: {error}; prepare the data again") from error
    if "shards" not in manifest:
        raise InputError(f"{place}: not the manifest of a preparation; point at the --output-dir of one")
    return manifest


def shard_entries(finished: Sequence[Finished], published: Names) -> dict[str, Any]:
    """The manifest's `recipes` and `shards`; `published` maps a shard's place to its names in each split."""
    recipes: dict[bytes, Mapping[str, Any]] = {}
    numbers: dict[bytes, int] = {}
    entries: list[dict[str, Any]] = []
    for item in finished:
        recipe = {name: value for name, value in item.receipt.identity.items() if name not in {"source", "decided"}}
        canonical = orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)
        recipes.setdefault(canonical, recipe)
        number = numbers.setdefault(canonical, len(numbers))
        entries.append(_entry(item, number, published.get(item.shard.place, {})))
    return {"recipes": list(recipes.values()), "shards": entries}


def _entry(item: Finished, recipe: int, published: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    part, receipt = item.shard.part, item.receipt
    facts = {"facts": receipt.facts} if receipt.facts else {}
    decided = {"decided": receipt.identity["decided"]} if "decided" in receipt.identity else {}
    return {
        "dataset": item.shard.dataset,
        "split": item.shard.split,
        "place": item.shard.place,
        "file": part.file.uri,
        "start": part.start,
        "stop": part.stop,
        "key": item.key,
        "recipe": recipe,
        "source": receipt.identity["source"],
        **decided,
        "rows": receipt.rows_in,
        "documents": {name: count.documents for name, count in receipt.parts.items()},
        "tokens": {name: count.tokens for name, count in receipt.parts.items()},
        "drops": receipt.drops,
        "quarantined": receipt.quarantined,
        "truncated": receipt.truncated,
        **facts,
        "published": {split: list(names) for split, names in published.items()},
    }


def identities(manifest: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The identity of every shard of a manifest, by its place, as it was planned: without what was decided later."""
    if manifest is None:
        return {}
    return {
        entry["place"]: {**manifest["recipes"][entry["recipe"]], "source": entry["source"]}
        for entry in manifest["shards"]
    }


def totals(finished: Iterable[Finished]) -> dict[str, Any]:
    """Rows, documents, tokens and drops: in all, per data set (`split/name`), and documents and tokens per split."""
    datasets: dict[str, Counter[str]] = {}
    drops: dict[str, Counter[str]] = {}
    splits: dict[str, Counter[str]] = {}
    for item in finished:
        receipt, name = item.receipt, f"{item.shard.split}/{item.shard.dataset}"
        counts = datasets.setdefault(name, Counter())
        counts.update(
            rows=receipt.rows_in, documents=receipt.documents, tokens=receipt.tokens,
            quarantined=receipt.quarantined, truncated=receipt.truncated, source_bytes=item.shard.part.size,
        )  # fmt: skip
        drops.setdefault(name, Counter()).update(receipt.drops)
        for part, count in receipt.parts.items():
            splits.setdefault(item.split_of(part), Counter()).update(documents=count.documents, tokens=count.tokens)
    return {
        **{field: sum(counts[field] for counts in datasets.values()) for field in SUMMED},
        "dropped": dict(sum(drops.values(), Counter())),
        "datasets": {name: {**counts, "dropped": dict(drops[name])} for name, counts in datasets.items()},
        "splits": {name: dict(counts) for name, counts in splits.items()},
    }
