"""Plan any preparation: blend and settings in, every shard with its identity out. No Prefect, no Dask.

Planning reads only what identities need: directory listings, and for new files the footers of Parquet and one hashing pass over
local files. A kind that must read data to choose its recipe does so in `recipes_of`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import orjson
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.discovery import find
from tokenmill.tasks.sources.files import Found, InputWarning, Require, Slice, SourceFile
from tokenmill.tasks.sources.forms import Form, Sample, require_form, spread, survey
from tokenmill.tasks.sources.parquet import Needed
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.sources.slices import ContentIndex, leading_rows, leading_share
from tokenmill.tasks.storage import absolute, join, user_cache
from xxhash import xxh3_128_hexdigest

from .bundles import bundled
from .contents import read_twice
from .identity import Recipe, shard_identities
from .input_checks import data_sets, require_separate, store_place
from .manifest import published_manifest
from .plan import Plan, PlannedShard
from .publish import publish_bytes
from .remembered import remembered
from .settings import SHARES, TINY_ROWS, Holdout, PreparationSettings
from .store import Store, read_bytes

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
    """The output folder as an absolute path, and the store of its shards: `settings.store`, or one in that folder.

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
    """The shards of a blend, and the receipts of built ones.

    With `bundles`, small files share shards. A kind that relates its shards to single files must set it to False. `form` is what rows must hold; None if
    that may differ. Raises InputError for anything that must be fixed first.
    """
    index_place = join(store.place, "index.json")
    index = ContentIndex.load(read_bytes(index_place) or b"{}")
    shards: list[PlannedShard] = []
    skipped: dict[str, Mapping[str, int]] = {}
    samples: dict[str, Sample] = {}
    warnings: list[InputWarning] = []
    read: list[tuple[str, DataSource, list[Slice]]] = []
    for split, sources in blend.parts().items():
        for source in sources:
            chosen, found = row_filter(source), find(source, split if split in SPLITS else "train")
            fields = chosen.read_with(fields_of(source))
            needed = Needed(require, fields_of(source), chosen) if chosen else require
            slices = _slices(found.files, settings, fields, needed, index)
            slices = [chosen.on(part) for part in slices]
            slices = index.identify(slices, fields, settings.change_detection)
            if not slices:
                raise InputError(f"dataset {source.name!r}: {_no_rows(source, found)}")
            name = f"{split}/{source.name}"
            warnings += [replace(warning, reads={name: 0}) for warning in found.warnings]
            read.append((name, source, slices))
            if found.skipped:
                skipped[name] = found.skipped
            if chosen:
                samples[name] = _sample(source, slices, store)
            recipes = recipes_of(source, split, slices)
            identities = shard_identities(store.kind, format_version, recipes, slices)
            planned = [
                PlannedShard(source.name, split, part, identity)
                for part, identity in zip(slices, identities, strict=True)
            ]
            shards += bundled(planned, store, settings.shard_size, rebuild=settings.force) if bundles else planned
    if index.changed:
        publish_bytes(index_place, index.dump())
    warnings += read_twice(read)
    plan = replace(Plan.of(store, shards, rebuild=settings.force), skipped=skipped, samples=samples, warnings=warnings)
    _require_form(blend, form, plan)
    return plan


def _sample(source: DataSource, slices: Sequence[Slice], store: Store) -> Sample:
    """Return the rows that a dataset's filter keeps, cached in the store. Raises InputError as `survey` does."""
    some = spread(slices)
    key = orjson.dumps(
        [[part.content, part.rows, part.filters, part.where, *([part.keys] if part.keys else [])] for part in some]
    )
    place = join(store.place, "gates", f"{xxh3_128_hexdigest(key)}.json")
    return remembered(place, Sample, lambda: survey(source, some))


def _require_form(blend: Blend, form: Form | None, plan: Plan) -> None:
    """Check the first pending rows of each dataset; built shards aren't read."""
    first = {(shard.split, shard.dataset): shard.part for shard in reversed(plan.pending)}
    for split, sources in blend.parts().items():
        for source in sources:
            if part := first.get((split, source.name)):
                require_form(source, form, part)


def _no_rows(source: DataSource, found: Found) -> str:
    """The error for a dataset without rows."""
    size = sum(file.size for file in found.files)
    held = f"{len(found.files)} files of {size:,} bytes" if len(found.files) > 1 else f"a file of {size:,} bytes"
    return f"{source.path} doesn't contain rows ({held}); fix the path, or remove the dataset from the blend"


def _slices(
    files: Sequence[SourceFile],
    settings: PreparationSettings,
    fields: Sequence[str],
    require: Require,
    index: ContentIndex,
) -> list[Slice]:
    """The slices of a dataset, in order, limited by scale and sample."""
    slices = index.slices(files, settings.shard_size, fields, require)
    if SHARES[settings.scale] < 1:
        slices = leading_share(slices, SHARES[settings.scale])
    limits = [rows for rows in (settings.sample, TINY_ROWS if settings.scale == "tiny" else None) if rows is not None]
    return leading_rows(slices, min(limits)) if limits else slices


def holdout_of(settings: PreparationSettings, split: str) -> Holdout | None:
    """The holdout of a dataset; None if the blend names the split itself, or the shares are 0."""
    holdout = settings.holdout
    return holdout if split not in SPLITS and (holdout.valid or holdout.test) else None


def require_no(source: DataSource, keys: Sequence[str], kind: str) -> None:
    """Raise InputError if a dataset has one of `keys`, which this preparation kind ignores."""
    for key in keys:
        if getattr(source, key):
            instead = f", or prepare the blend with {TAKING[key]}" if key in TAKING else ""
            raise InputError(
                f"dataset {source.name!r}: {key!r} doesn't affect {kind}, which takes rows as they are; remove it, "
                f"or apply it in an earlier preparation{instead}"
            )
