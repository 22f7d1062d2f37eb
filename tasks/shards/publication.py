"""Publication: from proven shards to the folder a trainer reads, all at once or not at all.

    OUT/train|valid|test/data_00000_1a2b3c4d.bin/.idx   names for the shards' files (hard links on a local disk)
    OUT/quarantine/<data set>.jsonl                     bad rows, with file, line and reason
    OUT/manifest.json                                   what everything is made of, and the hashes of these files
    OUT/blend.json                                      the entry point, replaced last

A published name carries the first eight digits of the shard's key: Megatron caches its sample index by path, so a
path must never mean other data than before. On an object store nothing is renamed: blend.json points into the store.
Publication refuses gaps: a planned shard without a receipt stops it, unless partial output was asked for, and then
the manifest says so. Two publications of one folder take turns; the last one wins whole.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, cast

import orjson
from xxhash import xxh3_128_hexdigest

from tasks.blend.models import SPLITS, Blend
from tasks.errors import RunError
from tasks.shards.lock import locked
from tasks.shards.manifest import BLEND, MANIFEST, Finished, manifest_bytes, shard_entries, totals
from tasks.shards.plan import Plan
from tasks.shards.publish import Output, link, publish, publish_bytes, sweep
from tasks.shards.store import Store, read_bytes
from tasks.sources.locate import first_row
from tasks.storage import filesystem, is_local, join

MOST_SHOWN = 5
TOLERATED_ROWS = 10
"""A data set may always have this many bad rows, however small it is."""

QUARANTINE = "quarantine"
PUBLISHED = re.compile(r"data_\d{5,}_[0-9a-f]{8}\.\w+")

Weights = Mapping[tuple[str, str], float]


def collect(plan: Plan, *, allow_partial: bool) -> tuple[list[Finished], list[str]]:
    """Every planned shard with its receipt, in plan order, and the places of those that have none.

    Raises RunError when any is missing, unless `allow_partial`.
    """
    receipts = plan.store.proven(plan.keys)
    pairs = list(zip(plan.shards, plan.keys, strict=True))
    finished = [Finished(shard, key, receipts[key]) for shard, key in pairs if key in receipts]
    missing = [shard.place for shard, key in pairs if key not in receipts]
    if missing and not allow_partial:
        shown = ", ".join(missing[:MOST_SHOWN])
        raise RunError(
            f"{len(missing)} of {len(pairs)} planned shards have no receipt: {shown}; run the same command again to "
            "build them, or set allow_partial=true to publish without them"
        )
    return finished, missing


def check_bad_rows(finished: Sequence[Finished], ceiling: float, *, tolerate: bool) -> None:
    """Raises RunError when a data set has more bad rows than the ceiling (or any, unless `tolerate`)."""
    rows: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for item in finished:
        name = f"{item.shard.split}/{item.shard.dataset}"
        rows[name] += item.receipt.rows_in
        bad[name] += item.receipt.quarantined
        kinds[name].update({reason: count for reason, count in item.receipt.drops.items() if reason not in BENIGN})
    for name, count in bad.items():
        allowed = max(TOLERATED_ROWS, int(ceiling * rows[name])) if tolerate else 0
        if count > allowed:
            worst = ", ".join(f"{reason} {number:,}" for reason, number in kinds[name].most_common(MOST_SHOWN))
            remedy = (
                "mend the data, or raise bad_row_ceiling" if tolerate else "mend the data, or set on_bad_row=quarantine"
            )
            raise RunError(
                f"data set {name.removeprefix('datasets/')!r}: {count:,} of {rows[name]:,} rows are bad ({worst}), {allowed:,} are allowed; {remedy}"
            )


BENIGN = {"blank_line", "empty_document", "too_short"}
"""Drops that are choices or conventions, not damage."""


def blend_weights(blend: Blend) -> Weights:
    """The weight of each data set, by `(split of the plan, name)`."""
    return {(split, source.name): source.weight for split, sources in blend.parts().items() for source in sources}


def publish_preparation(
    output_dir: str,
    store: Store,
    finished: Sequence[Finished],
    weights: Weights,
    header: Mapping[str, Any],
    volatile: Mapping[str, Any],
) -> dict[str, Any]:
    """Publish the finished shards under `output_dir` and return the manifest.

    `header` is what the manifest says of the preparation as a whole, `volatile` what may differ between equal runs.
    """
    local = is_local(output_dir)
    with locked(output_dir) if local else nullcontext():
        _sweep(output_dir, store)
        published = (
            _link_shards(output_dir, store, finished) if local and is_local(store.place) else _in_store(store, finished)
        )
        quarantines = _publish_quarantine(output_dir, store, finished)
        prefixes = {
            place: {split: _relative(prefix, output_dir) for split, prefix in of.items()}
            for place, of in published.items()
        }
        blend = blend_json(finished, published, weights)
        manifest = {
            **header,
            **shard_entries(finished, prefixes),
            "totals": totals(finished),
            "files": [asdict(file) for file in [_described(BLEND, blend), *quarantines]],
            "volatile": dict(volatile),
        }
        publish_bytes(join(output_dir, MANIFEST), manifest_bytes(manifest))
        publish_bytes(join(output_dir, BLEND), blend)
        if local:
            _remove_strangers(output_dir, published, {file.path for file in quarantines})
    return manifest


def _sweep(output_dir: str, store: Store) -> None:
    """Remove what killed runs left half-written, except in the folders of shards: building a shard sweeps its own."""
    folders = [join(output_dir, name) for name in ("", *SPLITS, QUARANTINE)] + [store.place, join(store.place, "gates")]
    for folder in folders:
        if is_local(folder):
            sweep(folder)


def _described(path: str, data: bytes) -> Output:
    return Output(path, len(data), xxh3_128_hexdigest(data))


def _relative(prefix: str, output_dir: str) -> str:
    return prefix.removeprefix(f"{output_dir}/")


def _parts(finished: Sequence[Finished]) -> Iterator[tuple[Finished, str, str]]:
    """Each part that holds tokens, with the split it belongs to, in plan order."""
    for item in finished:
        for part, count in item.receipt.parts.items():
            if count.tokens:
                yield item, part, item.split_of(part)


def _link_shards(output_dir: str, store: Store, finished: Sequence[Finished]) -> dict[str, dict[str, str]]:
    """Give every part its published name; the prefixes by place and split."""
    published: dict[str, dict[str, str]] = {}
    numbers: Counter[str] = Counter()
    for item, part, split in _parts(finished):
        prefix = join(output_dir, split, f"data_{numbers[split]:05d}_{item.key[:8]}")
        numbers[split] += 1
        for output in item.receipt.outputs:
            stem, _, ending = output.path.rpartition(".")
            if stem == part:
                link(store.path(item.key, output.path), f"{prefix}.{ending}")
        published.setdefault(item.shard.place, {})[split] = prefix
    return published


def _in_store(store: Store, finished: Sequence[Finished]) -> dict[str, dict[str, str]]:
    published: dict[str, dict[str, str]] = {}
    for item, part, split in _parts(finished):
        published.setdefault(item.shard.place, {})[split] = store.path(item.key, part)
    return published


def blend_json(finished: Sequence[Finished], published: Mapping[str, Mapping[str, str]], weights: Weights) -> bytes:
    """What Megatron reads: per split a flat list of weight and prefix, or null for a split without tokens.

    A shard weighs its data set's weight times its share of the data set's tokens in that split, so a data set is
    sampled by its weight however many shards it is cut into. Data sets of weight 0 are left out.
    """
    tokens: Counter[tuple[str, str, str]] = Counter()
    for item, part, split in _parts(finished):
        tokens[split, item.shard.split, item.shard.dataset] += item.receipt.parts[part].tokens
    lists: dict[str, list[str]] = {split: [] for split in SPLITS}
    for item, part, split in _parts(finished):
        weight = weights[item.shard.split, item.shard.dataset]
        if weight:
            share = item.receipt.parts[part].tokens / tokens[split, item.shard.split, item.shard.dataset]
            lists[split] += [repr(weight * share), published[item.shard.place][split]]
    return orjson.dumps({split: entries or None for split, entries in lists.items()}, option=orjson.OPT_INDENT_2)


def _publish_quarantine(output_dir: str, store: Store, finished: Sequence[Finished]) -> list[Output]:
    """One file of bad rows per data set, with file and line; their paths are relative to the output folder.

    A shard knows its rows by number within the slice. The line in the file is that plus the rows of the slices before.
    """
    before = _rows_before(finished)
    groups: defaultdict[str, list[Finished]] = defaultdict(list)
    for item in finished:
        if item.receipt.quarantined:
            split = f"{item.shard.split}-" if item.shard.split in SPLITS else ""
            groups[f"{QUARANTINE}/{split}{item.shard.dataset}.jsonl"].append(item)
    outputs: list[Output] = []
    for name, items in groups.items():
        with publish(join(output_dir, name)) as file:
            for item in items:
                file.write(_quarantined(item, store, before[item.shard.place]))
        outputs.append(replace(file.output, path=name))
    return outputs


def _rows_before(finished: Sequence[Finished]) -> dict[str, int]:
    """How many rows of the same file stand before each shard that has bad rows.

    That is what the receipts of the slices before it add up to. Where the slice right before is not there (a partial
    output, or a row longer than a slice), the file is counted.
    """
    rows: dict[str, int] = {}
    ends: dict[str, tuple[int, int | None]] = {}
    for item in finished:
        part = item.shard.part
        source = f"{item.shard.split}/{item.shard.dataset}/{part.file.uri}"
        stop, count = ends.get(source, (0, 0))
        if stop != part.start:
            count = None
        if item.receipt.quarantined:
            count = rows[item.shard.place] = first_row(part) if count is None else count
        ends[source] = (part.stop, None if count is None else count + item.receipt.rows_in)
    return rows


def _quarantined(item: Finished, store: Store, before: int) -> bytes:
    data = read_bytes(store.path(item.key, f"{QUARANTINE}.jsonl")) or b""
    lines: list[bytes] = []
    for line in data.splitlines():
        row = orjson.loads(line)
        place = {"file": item.shard.part.file.uri, "line": before + row.pop("row") + 1}
        lines.append(orjson.dumps({**place, **row}, option=orjson.OPT_APPEND_NEWLINE))
    return b"".join(lines)


def _remove_strangers(output_dir: str, published: Mapping[str, Mapping[str, str]], quarantines: set[str]) -> None:
    """Remove names that an earlier publication made and this one does not have."""
    ours = {prefix for of in published.values() for prefix in of.values()}
    system, root = filesystem(output_dir)
    for split in SPLITS:
        for path in cast("list[str]", system.glob(f"{root}/{split}/data_*")):
            if PUBLISHED.fullmatch(path.rpartition("/")[2]) and path.rpartition(".")[0] not in ours:
                system.rm_file(path)
    for path in cast("list[str]", system.glob(f"{root}/{QUARANTINE}/*.jsonl")):
        if path.removeprefix(f"{root}/") not in quarantines:
            system.rm_file(path)
