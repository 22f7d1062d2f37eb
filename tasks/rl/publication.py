"""Publication of JSON Lines: every shard under its own name, and one joined file per split.

    OUT/train|valid|test/data_00000_1a2b3c4d.jsonl   the shards' files (hard links on a local disk)
    OUT/splits/train_9f8e7d6c.jsonl                  all rows of the split, in the order of the plan, or of batches

RL trainers take one file per dataset and no globs, so the shards of a split are joined into one file; a single shard is only
linked. Training rows are ordered if `batch_size` is set (see `batches`). Names contain a hash of the content, so that a path never refers to different data later. The manifest lists the joined
files under `train`, `val` and `test`, and every shard in its list. Joining copies each byte once, at disk speed; zstd frames
are concatenated without decompression.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.shards.plan import Finished
from tokenmill.tasks.shards.publication import Listed, Published, Weights, blend_json
from tokenmill.tasks.shards.publish import Output, join_files, link, place_files
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import is_local, join

from .batches import BatchPlan, RowFile, write_ordered
from .settings import Compression
from .shard import ENDINGS

FOLDER = "splits"
SHARD = re.compile(r"data_\d{5,}_[0-9a-f]{8}\.jsonl(\.zst)?")
WHOLE_FILE = re.compile(r"(train|valid|test)_[0-9a-f]{8}\.jsonl(\.zst)?")

KEYS = {"train": "train", "valid": "val", "test": "test"}
"""The manifest's names for the whole files, as configurations of NeMo-RL recipes expect them."""


@dataclass(frozen=True, slots=True)
class _RlFile:
    """A part of a shard: its shard, its file in the store, and its name in the output folder."""

    item: Finished
    documents: int
    stored: str
    name: str


@dataclass(frozen=True, slots=True)
class JsonLinesLayout:
    """Row files and one joined file per split; `weights` are the blend's, `batches` the order of training rows, if any."""

    weights: Weights
    compression: Compression
    batches: BatchPlan | None = None

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The shards of each split, and the joined files."""
        return {**dict.fromkeys(SPLITS, SHARD), FOLDER: WHOLE_FILE}

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every shard on a local disk (elsewhere its name is its place in the store), and join the files of each split."""
        splits = self._files(output_dir, store, finished)
        names: dict[str, dict[str, list[str]]] = {}
        listed: list[Listed] = []
        written: list[Output] = []
        whole: dict[str, Any] = dict.fromkeys(KEYS.values(), "")
        for split, files in splits.items():
            place_files([(file.stored, file.name) for file in files if file.name != file.stored])
            for file in files:
                names.setdefault(file.item.shard.place, {})[split] = [file.name]
                listed.append(Listed(split, file.item.dataset, file.name, file.documents))
            output, entries = self._join(output_dir, split, files)
            written.append(output)
            whole |= entries
            whole[KEYS[split]] = join(output_dir, output.path)
        header: dict[str, Any] = {**whole, "run_hash": _hash([file for files in splits.values() for file in files])}
        return Published(names, blend_json(listed, self.weights), written, header)

    def _files(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> dict[str, list[_RlFile]]:
        """The files of each split that holds any rows, in the order of the plan."""
        linked = is_local(output_dir) and is_local(store.place)
        splits: defaultdict[str, list[_RlFile]] = defaultdict(list)
        for item in finished:
            for part, count in item.receipt.parts.items():
                split, ending = item.split_of(part), ENDINGS[self.compression]
                stored = store.path(item.key, f"{part}.{ending}")
                name = join(output_dir, split, f"data_{len(splits[split]):05d}_{item.key[:8]}.{ending}")
                splits[split].append(_RlFile(item, count.documents, stored, name if linked else stored))
        return {split: splits[split] for split in SPLITS if splits[split]}

    def _join(self, output_dir: str, split: str, files: Sequence[_RlFile]) -> tuple[Output, dict[str, Any]]:
        """Write the joined file of a split, whose path is relative to the output folder; its record, and entries of the manifest."""
        batches = self.batches if split == "train" else None
        order = batches.identity() if batches else None
        path = join(FOLDER, f"{split}_{_hash(files, order)}.{ENDINGS[self.compression]}")
        place = join(output_dir, path)
        if batches is not None:
            rows = [RowFile(file.item.shard.dataset, file.documents, file.stored) for file in files]
            output, entries = write_ordered(rows, batches, place)
            return replace(output, path=path), entries
        if len(files) == 1 and is_local(place) and is_local(files[0].stored):
            link(files[0].stored, place)
            name = files[0].stored.rpartition("/")[2]
            recorded = next(output for output in files[0].item.receipt.outputs if output.path == name)
            return replace(recorded, path=path), {}
        return replace(join_files([file.stored for file in files], place), path=path), {}


def _hash(files: Sequence[_RlFile], order: Mapping[str, Any] | None = None) -> str:
    """A hash of the contents of some files, and of the order of their rows if it is not theirs: eight hexadecimal digits."""
    content = [(file.item.key, file.stored.rpartition("/")[2]) for file in files]
    return hashlib.sha256(orjson.dumps([content, order] if order else content)).hexdigest()[:8]
