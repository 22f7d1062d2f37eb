"""Publish rows that stay as they were: a folder per dataset, in its original file format.

    OUT/data/<dataset>/part-00000-1a2b3c4d.jsonl   the shards' files (hard links on a local disk), or .parquet
    OUT/edges.parquet, OUT/hits.parquet             from deduplication: dropped and kept documents, runs shared with evaluations
    OUT/blend.json                                  the output as a blend, with what the input says of weights, budget, fields and `fim`

If the blend lists splits, datasets have folders within their split's. A name ends in the first digits of its shard's key,
so that a path never refers to different data later.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.shards.manifest import WHOLE, Finished
from tokenmill.tasks.shards.publication import Published
from tokenmill.tasks.shards.publish import Output, place_files
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import join

from .apply import file_of

FOLDER = "data"
KEPT = {
    *("weight", "text_field", "share", "tokens", "min_epochs", "max_epochs", "group"),
    *("fim", "license", "languages", "domain"),
}
"""What the output's blend says of a dataset as the input's does."""

PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}\.(jsonl|parquet)")


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Folders of rows, and other files: where the store has each, and its path in the output folder."""

    blend: Blend
    files: Sequence[tuple[str, Output]] = ()

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The files of each dataset."""
        folders = [_folder(split, source.name) for split, listed in self.blend.parts().items() for source in listed]
        return dict.fromkeys(folders, PART)

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every file on a local disk; on an object store the store copies it."""
        names: dict[str, dict[str, list[str]]] = {}
        numbers: Counter[str] = Counter()
        pairs = [(stored, join(output_dir, output.path)) for stored, output in self.files]
        for item in finished:
            if WHOLE not in item.receipt.parts:
                continue
            file, folder = file_of(item.shard.part), _folder(item.shard.split, item.shard.dataset)
            name = join(output_dir, folder, f"part-{numbers[folder]:05d}-{item.key[:8]}.{file.partition('.')[2]}")
            pairs.append((store.path(item.key, file), name))
            numbers[folder] += 1
            names.setdefault(item.shard.place, {}).setdefault(WHOLE, []).append(name)
        place_files(pairs)
        return Published(names, self._blend(output_dir, numbers), [output for _, output in self.files])

    def _blend(self, output_dir: str, numbers: Mapping[str, int]) -> bytes:
        """The output as a blend, without empty datasets."""
        parts = {
            split: [_source(output_dir, split, source) for source in listed if numbers[_folder(split, source.name)]]
            for split, listed in self.blend.parts().items()
        }
        budget = self.blend.model_dump(mode="json", exclude={"datasets", *SPLITS}, exclude_none=True)
        return orjson.dumps({**budget, **parts}, option=orjson.OPT_INDENT_2)


def _folder(split: str, name: str) -> str:
    return join(FOLDER, split, name) if split in SPLITS else join(FOLDER, name)


def _source(output_dir: str, split: str, source: DataSource) -> dict[str, Any]:
    kept = source.model_dump(mode="json", include=KEPT, exclude_none=True)
    return {"name": source.name, "path": join(output_dir, _folder(split, source.name)), **kept}
