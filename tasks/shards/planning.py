"""Plan any preparation: blend and settings in, every shard with its identity out. No Prefect, no Dask.

Planning reads only what identities need: directory listings, and for new files the footers of Parquet and one hashing pass over
local files. A kind that must read data to choose its recipe does so in `recipes_of`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from os.path import lexists
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.discovery import discover, divided, find, require_no_overlap
from tokenmill.tasks.sources.files import InputWarning, Require, Slice, SourceFile
from tokenmill.tasks.sources.forms import Form, Sample, require_form, spread, survey
from tokenmill.tasks.sources.parquet import Needed
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.sources.slices import ContentIndex, leading_rows, leading_share
from tokenmill.tasks.storage import absolute, is_local, join, user_cache
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from .manifest import BLEND, MANIFEST, published_manifest
from .plan import Plan, PlannedShard, proven_once
from .publish import publish_bytes
from .receipt import Receipt, Recipe, shard_identities, source_of
from .settings import SHARES, TINY_ROWS, PreparationSettings
from .store import Store, read_bytes, remembered, size_of

FieldsOf = Callable[[DataSource], Sequence[str]]
"""The fields of a dataset that its shards need."""

RecipesOf = Callable[[DataSource, str, Sequence[Slice]], Sequence[Recipe]]
"""The recipe of each slice of a dataset in a split of the blend."""


TAKING: Mapping[str, str] = {
    "converter": "tokenmill harmony",
    "transforms": "tokenmill rl",
    "fim": "tokenmill pretrain",
}
"""The commands for blends with keys that not every preparation kind takes."""


def places(blend: Blend, settings: PreparationSettings, output_dir: str | None, kind: str) -> tuple[str, Store]:
    """Return the output folder as an absolute path, and the store of its shards: `settings.store`, or one in that folder.

    Without an output folder (None), hashes are kept in the user's cache. Raises InputError as `require_separate` does, and
    for a `previous` version that does not exist.
    """
    output_dir = user_cache("plan") if output_dir is None else absolute(output_dir)
    store = store_place(settings.store, output_dir)
    require_separate(data_sets(blend), store, output_dir)
    if settings.previous is not None and published_manifest(settings.previous) is None:
        raise InputError(f"previous: published output not found in {settings.previous}; check the path")
    return output_dir, Store(store, kind)


def plan_shards(
    blend: Blend,
    settings: PreparationSettings,
    store: Store,
    format_version: int,
    fields_of: FieldsOf,
    require: Require,
    recipes_of: RecipesOf,
    *,
    bundles: bool = True,
    form: Form | None = None,
) -> Plan:
    """Return the shards of a blend, and the receipts of built ones.

    With `bundles`, small files share shards. A kind that relates its shards to single files must set it to False. `form` is what rows must hold; None if
    that may differ. Raises InputError for anything that must be fixed first.
    """
    index_place = join(store.place, "index.json")
    index = ContentIndex.load(read_bytes(index_place) or b"{}")
    shards: list[PlannedShard] = []
    seen: dict[str, Receipt | None] = {}
    skipped: dict[str, Mapping[str, int]] = {}
    samples: dict[str, Sample] = {}
    warnings: list[InputWarning] = []
    read: list[tuple[str, DataSource, list[Slice]]] = []
    for split, sources in blend.parts().items():
        for source in sources:
            chosen, found = row_filter(source), find(source, split if split in SPLITS else "train")
            fields = chosen.read_with(fields_of(source))
            needed = Needed(require, fields_of(source), chosen) if chosen else require
            slices = [chosen.on(part) for part in _slices(found.files, settings, fields, needed, index)]
            slices = index.identify(slices, fields, settings.change_detection)
            if not slices:
                files = f"{len(found.files)} files" if len(found.files) > 1 else "a file"
                raise InputError(
                    f"dataset {source.name!r}: {source.path} doesn't contain rows ({files} of "
                    f"{sum(file.size for file in found.files):,} bytes); fix the path, or remove the dataset from the blend"
                )
            name = f"{split}/{source.name}"
            warnings += [replace(warning, reads={name: 0}) for warning in found.warnings]
            read.append((name, source, slices))
            if found.skipped:
                skipped[name] = found.skipped
            if chosen:  # a filter's share is measured, because nothing else says how much it leaves
                samples[name] = _sample(source, slices, store)
            recipes = recipes_of(source, split, slices)
            identities = shard_identities(store.kind, format_version, recipes, slices)
            planned = [PlannedShard(source.name, split, *each) for each in zip(slices, identities, strict=True)]
            shards += bundled(planned, store, settings.shard_size, seen, rebuild=settings.force) if bundles else planned
    if index.changed:  # hashes take longest, so a later failure must not cost them
        publish_bytes(index_place, index.dump())
    warnings += read_twice(read)
    plan = Plan.of(store, shards, rebuild=settings.force, seen=seen)
    plan = replace(plan, skipped=skipped, samples=samples, warnings=warnings)
    # Built shards have been read, so only datasets with shards to build are looked at.
    first = {(shard.split, shard.dataset): shard.part for shard in reversed(plan.pending)}
    for name, source, _ in read:
        if part := first.get((name.partition("/")[0], source.name)):
            require_form(source, form, part)
    return plan


def _sample(source: DataSource, slices: Sequence[Slice], store: Store) -> Sample:
    """Return the rows that a dataset's filter keeps, cached in the store. Raises InputError as `survey` does."""
    some = spread(slices)
    key = orjson.dumps(
        [[part.content, part.rows, part.filters, part.where, *([part.keys] if part.keys else [])] for part in some]
    )
    place = join(store.place, "gates", f"{xxh3_128_hexdigest(key)}.json")
    return remembered(place, Sample, lambda: survey(source, some))


def _slices(
    files: Sequence[SourceFile],
    settings: PreparationSettings,
    fields: Sequence[str],
    require: Require,
    index: ContentIndex,
) -> list[Slice]:
    slices = index.slices(files, settings.shard_size, fields, require)
    if SHARES[settings.scale] < 1:
        slices = leading_share(slices, SHARES[settings.scale])
    limits = [rows for rows in (settings.sample, TINY_ROWS if settings.scale == "tiny" else None) if rows is not None]
    return leading_rows(slices, min(limits)) if limits else slices


def held_out(settings: PreparationSettings, split: str) -> dict[str, Any]:
    """Return the holdout in the recipe of a dataset; 0 if the blend names the split itself."""
    holdout = settings.holdout
    if split in SPLITS or not (holdout.valid or holdout.test):
        return {"holdout_valid": 0.0, "holdout_test": 0.0, "holdout_seed": None}
    return {"holdout_valid": holdout.valid, "holdout_test": holdout.test, "holdout_seed": holdout.seed}


def require_no(source: DataSource, keys: Sequence[str], kind: str) -> None:
    """Raise InputError if a dataset has one of `keys`, which this preparation kind ignores."""
    for key in keys:
        if getattr(source, key):
            instead = f", or prepare the blend with {TAKING[key]}" if key in TAKING else ""
            raise InputError(
                f"dataset {source.name!r}: {key!r} doesn't affect {kind}, which takes rows as they are; remove it, "
                f"or apply it in an earlier preparation{instead}"
            )


ELSEWHERE = {
    *("name", "path", "subset", "split", "revision", "license", "languages", "domain"),
    *("weight", "share", "tokens", "min_epochs", "max_epochs", "group"),
}
"""The keys of a dataset that don't change which documents are read from a file, unlike its filter or text field."""


def read_twice(read: Iterable[tuple[str, DataSource, Iterable[Slice]]]) -> Iterator[InputWarning]:
    """Warnings for content that datasets (`split/name`) read more than once, whatever its paths, in groups of equally read slices.

    It is trained on as often as all of them together ask for, and Megatron-LM shuffles files of the same size alike, so that copies
    follow each other at the same distance.
    """
    places: defaultdict[tuple[str, str, int | None], list[tuple[str, Slice]]] = defaultdict(list)
    for name, source, slices in read:
        way = source.model_dump_json(exclude=ELSEWHERE)
        for part in slices:
            places[way, part.content, part.rows].append((name, part))
    groups: defaultdict[tuple[tuple[str, int], ...], list[Slice]] = defaultdict(list)
    for found in places.values():
        if len(found) > 1:
            names = [name for name, _ in found]
            groups[tuple((name, names.count(name)) for name in dict.fromkeys(names))] += [part for _, part in found]
    for reads, parts in groups.items():
        files = list(dict.fromkeys(part.file.uri for part in parts))
        size = sum(part.size for part in parts) // sum(count for _, count in reads)
        yield InputWarning("read_twice", " and ".join(files[:2]), len(files), size, dict(reads))


SMALL = 1 / 2
"""Files below this part of `shard_size` are bundled."""

AVERAGE = 1 / 4
"""The average bundle, as a part of `shard_size`. A larger one would leave more boundaries to the limits."""

MOST_FILES = 4_096
"""Each file counts as its size plus this part of `shard_size`, so that tiny files have bundles of bounded length too."""


def bundled(
    shards: Sequence[PlannedShard], store: Store, shard_size: int, seen: dict[str, Receipt | None], *, rebuild: bool
) -> list[PlannedShard]:
    """Return the shards of a dataset with its small files bundled, in order, so that thousands of them become few shards.

    Boundaries depend on content, as in content-defined chunking: a hash of a file's content decides whether the file ends its bundle,
    with a probability in proportion to its size. So adding or removing a file rebuilds only the bundle that holds it, and its neighbor
    if the file ends a bundle; 2 % of the boundaries are due to the limits and move up to the next one by content. Files that the
    store has built as separate shards remain separate. With `rebuild`, the store is ignored; `seen` are receipts that were read.
    """
    groups = list(groups_by_content(shards, shard_size))
    bundles = [bundle(group) for group in groups]
    if rebuild:
        return bundles
    keys = {shard.key for shard in bundles if shard.part.members}
    missing = keys - proven_once(store, keys, seen).keys()
    broken = [shard.key in missing for shard in bundles]
    files = [shard.key for group, apart in zip(groups, broken, strict=True) if apart for shard in group]
    built = proven_once(store, files, seen).keys()
    found: list[PlannedShard] = []
    for group, whole, apart in zip(groups, bundles, broken, strict=True):
        if not apart:
            found.append(whole)
            continue
        for alone, run in groupby(group, lambda shard: shard.key in built):
            some = [*run]
            found += some if alone else [bundle(some)]
    return found


def groups_by_content(shards: Sequence[PlannedShard], shard_size: int) -> Iterator[list[PlannedShard]]:
    """Group the shards that belong in one bundle; the shard of a large file or of a sample is separate."""
    group: list[PlannedShard] = []
    size = 0.0
    before: object = None
    for shard in shards:
        part = shard.part
        own = part.size + shard_size / MOST_FILES
        small = part.start == 0 and part.rows is None and part.file.size < SMALL * shard_size
        kind = small and (part.file.format, part.file.compression, part.fields, shard.identity["recipe"])
        if group and (size + own > shard_size or not kind or kind != before):
            yield group
            group, size = [], 0.0
        before = kind
        group.append(shard)
        size += own
        if xxh3_64_intdigest(shard.part.content.encode()) < own / (AVERAGE * shard_size) * 2**64:
            yield group
            group, size = [], 0.0
    if group:
        yield group


def bundle(shards: Sequence[PlannedShard]) -> PlannedShard:
    """Return one shard with the rows of all shards, in order; a single shard remains unchanged."""
    first = shards[0]
    if len(shards) == 1:
        return first
    members = tuple(shard.part for shard in shards)
    contents = orjson.dumps([part.content for part in members])
    part = replace(
        first.part,
        content=f"bundle:{hashlib.sha256(contents).hexdigest()[:32]}",
        size=sum(part.size for part in members),
        members=members,
    )
    return replace(first, part=part, identity={**first.identity, "source": source_of(part, first.identity["recipe"])})


def check_inputs(blend: Blend, store: str | None, output_dir: str) -> None:
    """Raises InputError for missing local sources and unwritable store or output folders, and as `require_separate` does."""
    output_dir = absolute(output_dir)
    for sources in blend.parts().values():
        for source in sources:
            if is_local(source.path) and not lexists(divided(absolute(source.path))[0]):
                discover(source)  # names what is missing; planning discovers the others, once
    for place in (store_place(store, output_dir), output_dir):
        require_writable(place)
    require_separate(data_sets(blend), store_place(store, output_dir), output_dir)


def store_place(store: str | None, output_dir: str) -> str:
    """Return the store of shards: the named one, or one in the output folder."""
    return join(output_dir, "shards") if store is None else absolute(store)


def data_sets(blend: Blend) -> list[tuple[str, str]]:
    """Return a name for messages and the path of each dataset."""
    return [(f"dataset {source.name!r}", source.path) for sources in blend.parts().values() for source in sources]


def require_separate(sources: Iterable[tuple[str, str]], store: str, output_dir: str) -> None:
    """Raises InputError if inputs and outputs overlap.

    `sources` are names for messages, and paths. No source may contain a folder that a preparation writes to, or be inside
    its output folder. A blend.json in the output folder must not be an input blend, because publishing replaces it.
    """
    written = {"the output folder": output_dir, "the store": store, "the cache (XDG_CACHE_HOME)": user_cache()}
    for name, source in sources:
        require_no_overlap(name, source, written, output_dir)
    # A published blend.json has a manifest beside it, and names its own folder unless the folder was copied or moved.
    place = join(output_dir, BLEND)
    if size_of(place) is None or size_of(join(output_dir, MANIFEST)) is not None:
        return
    try:
        paths = [path for _, path in data_sets(load_blend(place))]
    except InputError:
        return
    if not all(path.startswith(f"{output_dir}/") for path in paths):
        raise InputError(
            f"{place}: is an input blend, and publishing here would replace it; move it, or choose a different output folder"
        )


def require_writable(place: str) -> None:
    """Raises InputError for a local folder that cannot be made or written."""
    if not is_local(place):
        return
    folder = Path(place)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{place}: cannot be written, because {folder} is a file; choose a different --output-dir")
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{folder} is not writable ({error.strerror})"
        raise InputError(f"{place}: cannot be written, because {reason}; choose a different --output-dir") from error
