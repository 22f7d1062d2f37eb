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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from tokenmill.tasks.shards.plan import WHOLE, Finished
from tokenmill.tasks.shards.publication import PART, Named, Published
from tokenmill.tasks.shards.publish import Output, place_files, publish_bytes
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import join

from .inventory import Entry, coverage_markdown, inventory
from .shard import CATALOG, FILE

FOLDER = "data"
TOOLS = "tools"
INVENTORY, COVERAGE = "inventory.json", "coverage.md"
TOOLS_OF_SHARD = re.compile(r"tools-\d{5,}-[0-9a-f]{8}\.json")
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Beside:
    """The files published next to the rows.

    `derived` are shards built from the rows, `folders` the target folders of their parts. `files` are files of the store with
    their paths in the output folder, `documents` the contents of small files, `header` is part of the manifest.
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
        named, splits = Named(output_dir), dict[str, Counter[str]]()
        # A shard whose rows were all dropped has no file.
        with_rows = [item for item in finished if WHOLE in item.receipt.parts]
        for item in with_rows:
            split, count = published_split(item.receipt.identity["recipe"]), item.receipt.parts[WHOLE]
            named.add(item, join(FOLDER, split), store.path(item.key, FILE))
            splits.setdefault(split, Counter()).update(rows=count.documents, tokens=count.tokens)
        counted = {split: dict(splits[split]) for split in sorted(splits)}
        licences = sum((Counter(item.receipt.facts["licences"]) for item in finished), Counter[str]())
        facts: dict[str, Any] = {"splits": counted, "licences": dict(sorted(licences.items())), **self._beside.header}
        found = inventory(map(_entry, finished))
        # Sorted keys, so that equal inventories are equal bytes.
        documents = {
            INVENTORY: orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS),
            COVERAGE: coverage_markdown(found).encode(),
            **self._beside.documents,
        }
        written = [replace(publish_bytes(join(output_dir, name), each), path=name) for name, each in documents.items()]
        files = [*_catalogs(store, finished), *self._beside.files]
        derived = Named(output_dir)
        for item in self._beside.derived:
            for output in item.receipt.outputs:
                part = output.path.partition(".")[0]
                if folder := self._beside.folders.get(part):
                    derived.add(item, folder, store.path(item.key, output.path), part)
        copied = [(stored, join(output_dir, output.path)) for stored, output in files]
        place_files([*named.pairs, *derived.pairs, *copied])
        written += [output for _, output in files]
        # The output as a blend of its splits, under train, valid and test if the blend listed them
        parts: dict[str, set[str]] = {}
        for recipe in (item.receipt.identity["recipe"] for item in with_rows):
            parts.setdefault(recipe["blend_split"] or "datasets", set()).add(published_split(recipe))
        sources = {
            part: [{"name": split, "path": join(output_dir, FOLDER, split)} for split in sorted(splits)]
            for part, splits in parts.items()
        }
        blend = orjson.dumps(sources or {"datasets": []}, option=orjson.OPT_INDENT_2)
        return Published(named.names, blend, written, facts, self._beside.derived, derived.names)


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


def published_split(recipe: Mapping[str, Any]) -> str:
    """Return the published split name of a recipe's rows: their split, prefixed with the blend's split if any, as a safe name."""
    of_blend = f"{recipe['blend_split']}-" if recipe["blend_split"] else ""
    name = UNSAFE.sub("_", f"{of_blend}{recipe['split']}")
    return name if name[:1].isalnum() else f"rows{name}"
