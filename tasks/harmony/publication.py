"""Publication of Harmony rows: a folder per split of the sources, which `datasets` loads directly.

    OUT/data/<split>/part-00000-1a2b3c4d.parquet   the shards' files, in the order of the plan (hard links on a local disk)
    OUT/data/train-<split>/…                       if the blend has train, valid and test, which remain separate
    OUT/blend.json                                 the output as a blend, for the next step
    OUT/tools/tools-00000-1a2b3c4d.json            the tools that the rows of a shard were offered, by `source_tools_id`
    OUT/inventory.json, coverage.md                fields of the sources and columns of the rows, with their counts

Outputs of later packages (pools, candidates, reports) are published beside the rows (`Beside`). A name ends in the first digits
of its shard's key, so that a path never refers to different data later.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from tokenmill.tasks.shards.plan import WHOLE, Finished
from tokenmill.tasks.shards.publication import Published
from tokenmill.tasks.shards.publish import Output, place_files, publish_bytes
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import join

from .inventory import Entry, coverage_markdown, inventory
from .shard import CATALOG, FILE

FOLDER = "data"
TOOLS = "tools"
INVENTORY, COVERAGE = "inventory.json", "coverage.md"
TOOLS_OF_SHARD = re.compile(r"tools-\d{5,}-[0-9a-f]{8}\.json")
PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}\.parquet")
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Beside:
    """The files published next to the rows.

    `derived` are shards built from the rows, `folders` the target folders of their parts. `files` are files of the store with
    their paths in the output folder, `documents` the contents of small files, `header` goes into the manifest.
    """

    derived: Sequence[Finished] = ()
    folders: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Sequence[tuple[str, Output]] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    header: Mapping[str, Any] = field(default_factory=dict[str, Any])


class DataLayout:
    """Row folders; `splits` are the splits of the plan, by the names in the sources."""

    def __init__(self, splits: Sequence[str], beside: Beside) -> None:
        self._splits = sorted(set(splits))
        self._beside = beside

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The files of each split, files derived from them, and catalogs of tools."""
        folders = [*(join(FOLDER, split) for split in self._splits), *self._beside.folders.values()]
        return {**dict.fromkeys(folders, PART), TOOLS: TOOLS_OF_SHARD}

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every shard on a local disk; on an object store the store copies it."""
        names: dict[str, dict[str, list[str]]] = {}
        numbers: Counter[str] = Counter()
        splits: dict[str, Counter[str]] = {}
        pairs: list[tuple[str, str]] = []
        for item in finished:
            if WHOLE not in item.receipt.parts:
                continue
            split, count = published_split(item.receipt.identity["recipe"]), item.receipt.parts[WHOLE]
            name = join(output_dir, FOLDER, split, f"part-{numbers[split]:05d}-{item.key[:8]}.parquet")
            pairs.append((store.path(item.key, FILE), name))
            numbers[split] += 1
            names.setdefault(item.shard.place, {}).setdefault(WHOLE, []).append(name)
            splits.setdefault(split, Counter()).update(rows=count.documents, tokens=count.tokens)
        counted = {split: dict(splits[split]) for split in sorted(splits)}
        facts: dict[str, Any] = {"splits": counted, "licences": _licences(finished), **self._beside.header}
        found = inventory(map(_entry, finished))
        documents = {
            INVENTORY: orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS),
            COVERAGE: coverage_markdown(found).encode(),
            **self._beside.documents,
        }
        written = [_write(output_dir, name, data) for name, data in documents.items()]
        files = [*_catalogs(store, finished), *self._beside.files]
        derived: dict[str, dict[str, list[str]]] = {}
        for item, part, stored, name in self._derived(output_dir):
            pairs.append((store.path(item.key, stored), name))
            derived.setdefault(item.shard.place, {})[part] = [name]
        place_files([*pairs, *((stored, join(output_dir, output.path)) for stored, output in files)])
        written += [output for _, output in files]
        # The output as a blend of its splits, under train, valid and test if the blend listed them
        recipes = [item.receipt.identity["recipe"] for item in finished if WHOLE in item.receipt.parts]
        parts: dict[str, set[str]] = {}
        for recipe in recipes:
            parts.setdefault(recipe["blend_split"] or "datasets", set()).add(published_split(recipe))
        sources = {
            part: [{"name": split, "path": join(output_dir, FOLDER, split)} for split in sorted(splits)]
            for part, splits in parts.items()
        }
        blend = orjson.dumps(sources or {"datasets": []}, option=orjson.OPT_INDENT_2)
        return Published(names, blend, written, facts, self._beside.derived, derived)

    def _derived(self, output_dir: str) -> Iterator[tuple[Finished, str, str, str]]:
        """The derived shards, each with a part, its file in the store, and its published name."""
        numbers: Counter[str] = Counter()
        for item in self._beside.derived:
            for output in item.receipt.outputs:
                part = output.path.partition(".")[0]
                if part not in self._beside.folders:
                    continue
                folder = join(output_dir, self._beside.folders[part])
                yield item, part, output.path, join(folder, f"part-{numbers[part]:05d}-{item.key[:8]}.parquet")
                numbers[part] += 1


def _licences(finished: Sequence[Finished]) -> dict[str, int]:
    return dict(sorted(sum((Counter(item.receipt.facts["licences"]) for item in finished), Counter[str]()).items()))


def _entry(item: Finished) -> Entry:
    """The counts of a shard, for the inventory."""
    receipt = item.receipt
    split = published_split(receipt.identity["recipe"])
    counts = (receipt.rows_in, receipt.documents, receipt.tokens, receipt.drops)
    return Entry(item.shard.dataset, split, *counts, receipt.facts["fields"], receipt.facts["coverage"])


def _catalogs(store: Store, finished: Sequence[Finished]) -> list[tuple[str, Output]]:
    """The catalogs of tools, each with its name in the output folder."""
    found: list[tuple[str, Output]] = []
    for item in finished:
        for output in item.receipt.outputs:
            if output.path == CATALOG:
                name = join(TOOLS, f"tools-{len(found):05d}-{item.key[:8]}.json")
                found.append((store.path(item.key, CATALOG), replace(output, path=name)))
    return found


def _write(output_dir: str, name: str, data: bytes) -> Output:
    return replace(publish_bytes(join(output_dir, name), data), path=name)


def published_split(recipe: Mapping[str, Any]) -> str:
    """The published split name of a recipe's rows: their split, prefixed with the blend's split if any, as a safe name."""
    of_blend = f"{recipe['blend_split']}-" if recipe["blend_split"] else ""
    name = UNSAFE.sub("_", f"{of_blend}{recipe['split']}")
    return name if name[:1].isalnum() else f"rows{name}"
