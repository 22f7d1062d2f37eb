"""Publication of scores: side tables in one folder.

    OUT/nll/part-00000-1a2b3c4d.parquet          a score per row, joined to the rows by `row_id`
    OUT/embeddings/part-00000-1a2b3c4d.parquet   instead, a vector per row
    OUT/blend.json                               the folder as a blend

The manifest tells for each part which file was scored (`file`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
from tokenmill.tasks.shards.manifest import WHOLE, Finished
from tokenmill.tasks.shards.publication import Published
from tokenmill.tasks.shards.publish import place_files
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import join

from .shard import FILE

PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}\.parquet")


@dataclass(frozen=True, slots=True)
class ScoresLayout:
    """All parts in one `folder`."""

    folder: str

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The parts."""
        return {self.folder: PART}

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every shard that holds a score on a local disk; on an object store the store copies it."""
        names: dict[str, dict[str, list[str]]] = {}
        pairs: list[tuple[str, str]] = []
        for item in finished:
            if WHOLE in item.receipt.parts:
                name = join(output_dir, self.folder, f"part-{len(names):05d}-{item.key[:8]}.parquet")
                pairs.append((store.path(item.key, FILE), name))
                names[item.shard.place] = {WHOLE: [name]}
        place_files(pairs)
        sources = [{"name": self.folder, "path": join(output_dir, self.folder)}]
        blend = orjson.dumps({"datasets": sources}, option=orjson.OPT_INDENT_2)
        return Published(names, blend)
