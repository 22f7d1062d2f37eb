"""Prefixes: the `.bin/.idx` pairs that a trainer opens, joined from the pairs of shards.

Megatron repeats each prefix until it fills whole samples, and drops its last partial sample. With a prefix per shard, a blend of
150 small files showed 22.7 % of its documents never and others twice; it also opens 32,766 prefixes at most, and prepares their
order in a time that grows with prefixes x samples. So the shards of a dataset in a split are published as one prefix, or as several of about
`prefix_size` bytes of `.bin`, in plan order.

A prefix is a shard in `STORE/prefix/<key>/`, and its key is the hash of its members: blends that share a dataset
share its prefixes, and a dataset that grows rewrites only the last one. The `.bin` is joined by the storage, the `.idx`
computed from the members' hashes, one at a time. Then the members' own `.bin` files are removed: their bytes are in the prefix,
which every later run finds through its receipt (see `shards.store`). A shard that is built again, after damage, has its own
`.bin` again, and so its prefix is joined again from that and from its other extents.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard, consecutive
from tokenmill.tasks.shards.publication import parts_with_tokens
from tokenmill.tasks.shards.publish import Extent, Joined, Output, join_extents
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import PREFIX, THREADS, Store, read_bytes, remove_file, size_of
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.storage import join
from xxhash import xxh3_128

from .binidx import BinIdxError, read_index, write_index

FORMAT_VERSION = 1

MOST_PREFIXES = 32_766
"""Megatron numbers the prefixes of a split in 16 bits: `assert len(datasets) < 32767` in its BlendedDataset."""


@dataclass(frozen=True, slots=True)
class PrefixRecipe:
    """`shards` is the kind of the members, `dtype` the type of the token ids."""

    shards: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Member:
    """The pair of one part of a shard; `tokens` is its `.bin`."""

    receipt: Receipt
    part: str
    tokens: Output
    count: PartCount

    @classmethod
    def of(cls, receipt: Receipt, part: str) -> "Member":
        """Return the pair of a part. Raises RunError if the receipt lists none."""
        tokens = next((output for output in receipt.outputs if output.path == f"{part}.bin"), None)
        if tokens is None or part not in receipt.parts:
            raise RunError(f"shard {receipt.key}: its receipt lists no {part}.bin; run tokenmill verify on the folder")
        return cls(receipt, part, tokens, receipt.parts[part])

    @property
    def name(self) -> str:
        """`<key>/<path>` of its `.bin`."""
        return f"{self.receipt.key}/{self.tokens.path}"


def plan_prefixes(finished: Sequence[Finished], shards: Store, prefix_size: int, dtype: np.dtype[np.integer]) -> Plan:
    """Return the prefixes of finished shards, in the order of the plan, and the receipts of those that are whole.

    A prefix is whole if it is verified and its members don't have their own `.bin`. Raises InputError if a split has more prefixes than
    Megatron can open.
    """
    recipe = PrefixRecipe(shards.kind, dtype.name)
    groups: dict[tuple[str, str, str, str], list[Member]] = {}
    for item, part, published in parts_with_tokens(finished):
        groups.setdefault((*item.dataset, part, published), []).append(Member.of(item.receipt, part))
    planned: list[PlannedShard] = []
    count: Counter[str] = Counter()
    for (split, dataset, part, published), members in groups.items():
        for number, group in enumerate(consecutive(members, lambda member: member.tokens.size, prefix_size)):
            size = sum(member.tokens.size for member in group)
            documents = sum(member.count.documents for member in group)
            # The key depends on the members alone: neither on the dataset nor on its place in the blend.
            identity = {
                "kind": PREFIX,
                "format_version": FORMAT_VERSION,
                "recipe": asdict(recipe),
                "source": {"members": [member.name for member in group]},
            }
            place = Slice(SourceFile(f"{part}-{number:05d}", size, PREFIX), 0, documents, size=size)
            receipts = tuple(member.receipt for member in group)
            planned.append(PlannedShard(dataset, split, place, identity, receipts))
            count[published] += 1
    for published, prefixes in count.items():
        if prefixes > MOST_PREFIXES:
            raise InputError(
                f"prefix_size: gives {prefixes:,} prefixes in {published}, and Megatron opens {MOST_PREFIXES:,} at most; "
                "raise prefix_size, or join datasets of the blend"
            )
    plan = Plan.of(Store(shards.place, PREFIX), planned, rebuild=False)
    whole = {shard.key for shard in planned if shard.key in plan.proven and not _has_loose_members(shards, shard)}
    return replace(plan, proven={key: receipt for key, receipt in plan.proven.items() if key in whole})


def build_prefix(shard: PlannedShard, store: Store) -> Receipt:
    """Join one planned prefix in this process, unless it is whole; then remove the members' own `.bin` files.

    Memory is one member's `.idx`. Raises RunError if the tokens of a member are gone.
    """
    recipe = PrefixRecipe(**shard.identity["recipe"])
    shards = Store(store.place, recipe.shards)
    # A different run may have built it since the plan.
    whole = store.receipt(shard.key)
    if whole is not None and not _has_loose_members(shards, shard):
        return whole
    members = _members(shard.inputs, shard.identity["source"]["members"])
    part = members[0].part
    with building(shard, store) as builder:
        place = store.path(shard.key, f"{part}.bin")
        _join(shards, members, place)
        # Its hash follows from the members', so the joined bytes aren't read again.
        builder.outputs.append(Joined.of(place, [member.tokens for member in members]))
        documents = sum(member.count.documents for member in members)
        index = builder.open(f"{part}.idx")
        write_index(index.write, lambda: _lengths(members, shards.read), documents, np.dtype(recipe.dtype))
        builder.rows_in = documents
        builder.keep(part, documents, sum(member.count.tokens for member in members))
    # Only now, because until its receipt is written nothing finds the tokens in the prefix.
    for member in members:
        remove_file(shards.path(member.receipt.key, member.tokens.path))
    return builder.receipt


def _members(receipts: Iterable[Receipt], names: Sequence[str]) -> list[Member]:
    known = {receipt.key: receipt for receipt in receipts}
    parts = [name.partition("/") for name in names]
    return [Member.of(known[key], path.removesuffix(".bin")) for key, _, path in parts]


def _has_loose_members(shards: Store, shard: PlannedShard) -> bool:
    """Whether a member of a prefix has its own `.bin`, because it was built again, or was to be removed."""
    places = [join(shards.place, shards.kind, name) for name in shard.identity["source"]["members"]]
    return any(size is not None for size in in_threads(size_of, places, THREADS))


def _join(shards: Store, members: Sequence[Member], place: str) -> None:
    """Join the bytes of the members, which are in their own `.bin` files or in prefixes.

    Raises RunError if the tokens of a member are nowhere, as after a removal by `prune`.
    """
    # A list, because equal shards of a dataset are one shard, which is a member twice.
    own = [(each.name, Extent(join(shards.place, shards.kind, each.name), 0, each.tokens.size)) for each in members]
    # A different run may have just joined a member into its prefix; each attempt finds one more there.
    for left in range(len(members), -1, -1):
        sizes = in_threads(lambda each: size_of(each[1].uri), own, THREADS)
        here = {name: extent for (name, extent), size in zip(own, sizes, strict=True) if size == extent.size}
        # To list the prefixes of a store reads all of their receipts.
        places = here if here.keys() >= {name for name, _ in own} else {**shards.joined(), **here}
        for name, extent in own:
            if name not in places:
                raise RunError(f"{extent.uri}: the tokens are missing; run the same command again to build them")
        try:
            return join_extents([places[name] for name, _ in own], place)
        except FileNotFoundError:
            if not left:
                raise
    return None


def _lengths(members: Sequence[Member], read: Callable[[Receipt, str], bytes]) -> Iterator[np.ndarray]:
    """The lengths of the documents of each member, from its `.idx`."""
    for member in members:
        yield read_index(read(member.receipt, f"{member.part}.idx"), member.tokens.size).lengths


def inspect_prefix(store: Store, receipt: Receipt) -> list[str]:
    """Return whether the `.idx` of a prefix is the one that the indices of its members give.

    Members without a valid receipt or index are not compared; inspecting them reports that.
    """
    recipe = PrefixRecipe(**receipt.identity["recipe"])
    shards = Store(store.place, recipe.shards)
    (index,) = (output for output in receipt.outputs if output.path.endswith(".idx"))
    expected = xxh3_128()

    def read(of: Receipt, name: str) -> bytes:
        return read_bytes(shards.path(of.key, name)) or b""

    try:
        names = receipt.identity["source"]["members"]
        members = _members(shards.proven(name.partition("/")[0] for name in names).values(), names)
        write_index(expected.update, lambda: _lengths(members, read), receipt.documents, np.dtype(recipe.dtype))
    except (KeyError, RunError, BinIdxError):
        return []
    if index.xxh3_128 == expected.hexdigest():
        return []
    return [f"{store.path(receipt.key, index.path)}: differs from the indices of its {len(members)} shards"]
