"""Signing a slice: one pass over its documents writes everything that the later steps ask of it.

    exact.arrow      the hash of each text                       cut by key
    bands.arrow      32 keys of a MinHash sketch of each view    cut by key; where near-duplicates are looked for
    shingles.arrow   the runs of five words of each view         where near-duplicates are looked for
    units.arrow      how many units each view is made of         the same
    prompts.arrow    the prompt of each document                 cut by key; where there is a cap
    names.arrow      what each document is called                where they have names of their own
    hits.arrow       the runs of words shared with evaluations   where there are any

All of it follows from the content of the slice and the recipe, documents being called by their rows: a slice is signed
once, whatever stands beside it. A million documents of 480 bytes take some 25 s of a core, a fifth of it
sketches, and 1.3 GB on disk.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

from . import cap, exact, near
from .candidates import BANDS_SCHEMA
from .contamination import HITS, Evaluations, hits
from .documents import Documents, content, ranks_of
from .keyed import KEYED
from .near import MADE_OF, SHINGLED, NearFiles
from .normalize import normalized
from .partitions import PartitionedFile, partitioned
from .readers import READERS, Signable
from .settings import SignRecipe

NAMES = pa.schema([pa.field("number", pa.int64()), pa.field("name", pa.large_string())])
"""A document and what it is called, documents in ascending order."""


def sign_slice(shard: PlannedShard, store: Store, evaluations: Evaluations | None) -> Receipt:
    """Sign one slice in its folder of the store and publish its receipt.

    Raises RunError when the source changed since the plan, OSError from the storage.
    """
    recipe = SignRecipe(**shard.identity["recipe"])
    with building(shard, store) as builder:
        signatures = _Signatures(builder, recipe, evaluations)
        for documents in READERS[recipe.reader](shard.part, recipe.options, recipe.near_on):
            signatures.add(documents)
        if recipe.near:
            builder.facts["units"] = dict(sorted(signatures.units.items()))
        if recipe.prompts:
            builder.facts["without_prompt"] = signatures.without_prompt
    return builder.receipt


@dataclass
class _Signatures:
    """The files of a slice being signed; a slice without documents has them too, empty."""

    builder: ShardBuilder
    recipe: SignRecipe
    evaluations: Evaluations | None
    files: dict[str, PartitionedFile] = field(default_factory=dict[str, PartitionedFile])
    without_prompt: int = 0
    units: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self._open("exact", KEYED, self.recipe.partitions)
        if self.recipe.near:
            self._open("bands", BANDS_SCHEMA, self.recipe.partitions)
            self._open("shingles", SHINGLED, 1)
            self._open("units", MADE_OF, 1)
        if self.recipe.prompts:
            self._open("prompts", KEYED, self.recipe.partitions)
        if self.evaluations is not None:
            self._open("hits", HITS, 1)

    def _open(self, name: str, schema: pa.Schema, partitions: int) -> PartitionedFile:
        if name not in self.files:
            self.files[name] = self.builder.enter(
                partitioned(f"{self.builder.folder}/{name}.arrow", schema, partitions)
            )
        return self.files[name]

    def add(self, some: Signable) -> None:
        """Sign some documents."""
        self.builder.rows_in += len(some.rows) + sum(some.left_out.values())
        self.builder.drops.update(some.left_out)
        if not len(some.rows):
            return
        self.builder.keep(WHOLE, len(some.rows))
        nobody, sizes = np.zeros(len(some.rows), np.int64), np.diff(content(some.texts)[1])
        ranks = ranks_of(some.qualities, sizes, nobody)
        texts = normalized(some.texts)
        exact.sign(self.files["exact"], Documents(some.rows, texts, ranks))
        views = texts if some.views is some.texts else normalized(some.views)
        if self.recipe.near:
            files = NearFiles(self.files["bands"], self.files["shingles"], self.files["units"])
            self.units += near.sign(files, Documents(some.rows, views, ranks))
        if self.evaluations is not None:
            self.files["hits"].append(hits(Documents(some.rows, views, ranks), self.evaluations))
        if self.recipe.prompts and some.prompts is not None:
            shortest = ranks_of(some.qualities, -sizes, nobody)
            self.without_prompt += cap.sign(self.files["prompts"], some.rows, some.prompts, shortest)
        if some.names is not None:
            table = pa.Table.from_arrays([pa.array(some.rows), some.names], schema=NAMES)
            self._open("names", NAMES, 1).append(table)
