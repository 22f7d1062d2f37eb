"""The rounds of deduplication: which shards each has, and what building one of them does.

    sign     per slice       what the other rounds ask of its documents      (in sign.py)
    exact    per partition   edges of exact duplicates
    pairs    per partition   candidates, exact duplicates left out
    verify   per partition   the pairs that are alike, compared shingle by shingle
    narrow   one shard       who surely goes, whatever large buckets hold
    crowds   per partition   the pairs that are alike among those who are left in large buckets
    settle   one shard       who goes as a near-duplicate, and who is contaminated
    cap      per partition   who is beyond the cap of a prompt, of those that are left
    decide   one shard       what became of each document, by slice; edges and hits for people

Every part of a round is a shard like any other: with a key, a folder in the store, and a receipt written last. A round
starts when the one before is proven, and builds only what has no receipt. The keys follow from the keys of the
signatures, so that planning knows them all before anything is built.

A partition takes the memory of its rows (768 bytes of bands a document, some 0.4 GB where a partition stands for 128 MB
of text); to settle takes some 100 bytes a verified pair, to decide some 200 a document that does not stay. A partition
opens a file of every slice, so that slices should be large.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import orjson
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.identity import shard_identity
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.storage import join
from xxhash import xxh3_128_hexdigest

from .distinct import distinct
from .partitions import ROWS_PER_SLICE, SliceFile
from .settings import RoundRecipe, Step

KIND = "dedup"
FORMAT_VERSION = 2
"""Raised whenever the same recipe and source would give other bytes than before."""

ROSTERS = "rosters"
PARTITION_BYTES = 128_000_000
MOST_PARTITIONS = 1024

CONCERNS: Mapping[Step, Sequence[str]] = {
    "exact": (),
    "pairs": (),
    "verify": ("threshold",),
    "narrow": ("threshold",),
    "crowds": ("threshold",),
    "settle": ("threshold", "evaluations"),
    "cap": ("threshold", "evaluations", "cap"),
    "decide": ("threshold", "evaluations", "cap"),
}
"""The choices that have a say in what each step finds."""

ONCE: Sequence[Step] = ("narrow", "settle", "decide")
"""Steps that are one shard."""

NEAR: Sequence[Step] = ("pairs", "verify", "narrow", "crowds")
"""Steps that are taken where near-duplicates are looked for."""


def partitions_for(source_bytes: int) -> int:
    """How many partitions: the power of two that gives each at most 128 MB of the sources, up to 1024. It changes only
    when the data doubles, so that signatures outlive what is added.
    """
    wanted = max(1, -(-source_bytes // PARTITION_BYTES))
    return min(MOST_PARTITIONS, 1 << (wanted - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Roster:
    """The slices whose documents are held against each other, in the order of their numbers: the keys of their
    signatures, and what their documents are called before `#row`, where they have no names of their own.
    """

    signatures: tuple[str, ...]
    names: tuple[str, ...]

    def dump(self) -> bytes:
        """The roster as JSON."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    def place(self, store: Store) -> str:
        """Where it lies in the store."""
        return join(store.folder(ROSTERS), f"{xxh3_128_hexdigest(self.dump())}.json")

    @classmethod
    def load(cls, uri: str) -> "Roster":
        """The roster in a file, which is called by the hash of its content. Raises RunError for any other content."""
        data = read_bytes(uri) or b""
        if uri.rpartition("/")[2] != f"{xxh3_128_hexdigest(data)}.json":
            raise RunError(f"{uri}: gone or damaged since it was written; run the same command again to write it anew")
        fields = orjson.loads(data)
        return cls(tuple(fields["signatures"]), tuple(fields["names"]))

    def publish(self, store: Store) -> str:
        """Write it, and say where."""
        return publish_bytes(self.place(store), self.dump()).path


@dataclass(frozen=True, slots=True)
class Rounds:
    """All rounds over one roster; `uri` is where it lies, `recipe` holds the choices, `size` the bytes of the sources."""

    store: Store
    roster: Roster
    uri: str
    recipe: RoundRecipe
    size: int = 0

    @property
    def steps(self) -> Iterator[Step]:
        """The steps that the choices ask for, in order."""
        asked = {**dict.fromkeys(NEAR, self.recipe.threshold), "cap": self.recipe.cap}
        return (step for step in CONCERNS if asked.get(step, 1) is not None)

    def shards(self, step: Step) -> list[PlannedShard]:
        """The shards of a step; none where it is not asked for."""
        if step not in self.steps:
            return []
        recipe = RoundRecipe(
            step, self.recipe.partitions, **{name: getattr(self.recipe, name) for name in CONCERNS[step]}
        )
        whole = self.roster if step == "decide" else replace(self.roster, names=())
        content = xxh3_128_hexdigest(whole.dump())
        count = 1 if step in ONCE else self.recipe.partitions
        file = SourceFile(self.uri, self.size, "json")
        parts = [
            Slice(file, number, number + 1, f"{content}[{number}:{number + 1}]", size=self.size // count)
            for number in range(count)
        ]
        return [PlannedShard("all", step, part, shard_identity(KIND, FORMAT_VERSION, recipe, part)) for part in parts]

    def signatures(self, name: str) -> list[SliceFile]:
        """The files of that name of all slices."""
        return [
            SliceFile(self.store.path(key, f"{name}.arrow"), number * ROWS_PER_SLICE)
            for number, key in enumerate(self.roster.signatures)
        ]

    def results(self, step: Step, name: str) -> list[str]:
        """The files of that name that a step has written; none where it is not asked for."""
        return [self.store.path(shard.key, f"{name}.arrow") for shard in self.shards(step)]


def rounds_of(shard: PlannedShard, store: Store) -> Rounds:
    """The rounds that a shard of one is of, as far as they concern it."""
    recipe, uri = RoundRecipe(**shard.identity["recipe"]), shard.part.file.uri
    return Rounds(store, Roster.load(uri), uri, recipe)


def sorted_union(*arrays: np.ndarray) -> np.ndarray:
    """Numbers of documents out of several arrays, int64, ascending, each once."""
    return distinct(np.concatenate([np.empty(0, np.int64), *arrays]))
