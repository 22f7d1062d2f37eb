"""Publication: from proven shards to the folder a trainer reads, all or nothing.

    OUT/…                             names for the shards' files, in the layout of their kind
    OUT/quarantine/<dataset>.jsonl   bad rows, with file, line and reason
    OUT/manifest.json                 the preparation down to each shard, and the hashes of these files
    OUT/blend.json                    the entry point, replaced last

A kind's `Layout` names its shards. A name carries the first eight digits of the shard's key: trainers cache by path, so the
data at a path must never change. This also makes replacement safe: old and new names coexist until blend.json is replaced, then
the old ones are removed. A planned shard without a receipt stops publication, unless partial output is allowed; then the
manifest records it. Two publications of one local folder take turns, and the last one replaces everything. Object stores lack
locks, so there the caller must prevent overlap.
"""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, cast

import orjson
from tokenmill.tasks.blend.mix import Mix, solve
from tokenmill.tasks.blend.models import SPLITS, Blend, listed_sources
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.sources.formats import first_row
from tokenmill.tasks.storage import filesystem, is_local, join
from xxhash import xxh3_128_hexdigest

from .manifest import (
    BLEND,
    FAILED,
    MANIFEST,
    Names,
    Origin,
    derived_entries,
    origin_of,
    origins_of,
    published_manifest,
    shard_entries,
    totals,
)
from .plan import MOST_SHOWN, WHOLE, Finished
from .publish import Output, copy, place_files, publish, publish_bytes, sweep
from .receipt import outputs_of
from .records import Manifest, Totals
from .settings import PreparationSettings
from .store import Store, locked

TOLERATED_ROWS = 10
"""Any dataset may have this many bad rows, even if it is small."""

QUARANTINE, QUARANTINED = "quarantine", "quarantine.jsonl"
"""The published folder with bad rows, and the shard file with them."""

QUARANTINES = re.compile(r".+\.jsonl")

PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}\.\w+")

REPLACED = "replaced"
"""The folder that keeps the manifest of a publication of a different kind, for the next run if this one is killed."""

Weights = Mapping[tuple[str, str], float]
"""The weight of each dataset, by `(split of the plan, name)`."""


@dataclass(frozen=True, slots=True)
class Published:
    """The result of writing a layout to the output folder.

    `blend` is the new blend.json and `names` are its absolute names. `files` are those written besides the shards' own, with
    paths relative to the output folder; the manifest records their hashes and includes `header`. `derived` are shards made from
    the shards, with their own names, `derived_names`.
    """

    names: Names
    blend: bytes
    files: Sequence[Output] = ()
    header: Mapping[str, Any] = field(default_factory=dict[str, Any])
    derived: Sequence[Finished] = ()
    derived_names: Names = field(default_factory=dict[str, Mapping[str, Sequence[str]]])


class Layout(Protocol):
    """The layout of one shard kind in the output folder."""

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The names that publications of this kind make, by folder; stale ones may be removed."""
        ...

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Name the shards' files, never reusing an earlier name for other data, and return the new blend.json."""
        ...


@dataclass(slots=True)
class Named:
    """Return the file names for shards in an output folder, numbered by folder in the order of the plan.

    `pairs` are the place of each file in the store, and its name. Unless `linked`, files are named by their places.
    """

    output_dir: str
    linked: bool = True
    names: dict[str, dict[str, list[str]]] = field(default_factory=dict[str, dict[str, list[str]]])
    pairs: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    numbers: Counter[str] = field(default_factory=Counter[str])

    def add(
        self,
        item: Finished,
        folder: str,
        stored: str,
        split: str = WHOLE,
        pattern: str = "part-{:05d}-{}",
        endings: Sequence[str] = (),
    ) -> str:
        """Name the file at `stored`; the name ends as the file does. With `endings`, name the files that begin so."""
        name = stored
        if self.linked:
            ending = "" if endings else f".{stored.rpartition('/')[2].partition('.')[2]}"
            name = join(self.output_dir, folder, f"{pattern.format(self.numbers[folder], item.key[:8])}{ending}")
            self.pairs += [(f"{stored}{each}", f"{name}{each}") for each in endings or [""]]
        self.numbers[folder] += 1
        self.names.setdefault(item.shard.place, {}).setdefault(split, []).append(name)
        return name


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """Row folders, OUT/<folder>/part-00000-1a2b3c4d.<ending>, and other files: the place of each in the store, and its path.

    `folders` are the folder of each dataset, or of all; `blend` makes blend.json of the output folder and the folders with rows,
    by default a dataset per folder. A shard's file is its output `all`, linked on a local disk and copied by an object store.
    """

    folders: Mapping[tuple[str, str], str] | str
    blend: Callable[[str, Collection[str]], bytes] | None = None
    files: Sequence[tuple[str, Output]] = ()

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        return dict.fromkeys([self.folders] if isinstance(self.folders, str) else self.folders.values(), PART)

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        named = Named(output_dir)
        for item in finished:
            if WHOLE in item.receipt.parts:
                (file,) = outputs_of(WHOLE, item.receipt.outputs)
                folder = self.folders if isinstance(self.folders, str) else self.folders[item.dataset]
                named.add(item, folder, store.path(item.key, file.path))
        place_files([*((stored, join(output_dir, output.path)) for stored, output in self.files), *named.pairs])
        sources = [{"name": folder, "path": join(output_dir, folder)} for folder in self.own]
        listed = orjson.dumps({"datasets": sources}, option=orjson.OPT_INDENT_2)
        blend = self.blend(output_dir, named.numbers.keys()) if self.blend else listed
        return Published(named.names, blend, [output for _, output in self.files])


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry for blend.json: a name, its split, and its dataset as `(split of the plan, name)`.

    Its size is in tokens, or in documents if nothing is tokenized.
    """

    split: str
    dataset: tuple[str, str]
    path: str
    amount: int


def check_bad_rows(finished: Sequence[Finished], store: Store, ceiling: float, *, tolerate: bool) -> None:
    """Raises RunError if a dataset has more bad rows than the ceiling (or any, unless `tolerate`); the message shows one."""
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
            of_it = [item for item in finished if "/".join(item.dataset) == name and item.receipt.quarantined]
            worst = ", ".join(f"{reason} {number:,}" for reason, number in kinds[name].most_common(MOST_SHOWN))
            remedy = (
                "fix the data, or raise max_bad_row_fraction"
                if tolerate
                else "fix the data, or set on_bad_row=quarantine"
            )
            raise RunError(
                f"dataset {name.removeprefix('datasets/')!r}: {count:,} of {rows[name]:,} rows are bad ({worst}), {allowed:,} are allowed; "
                f"{remedy}. The first: {first_bad_row(of_it, store) or f'in {of_it[0].shard.part.file.uri}'}"
            )


def first_bad_row(finished: Sequence[Finished], store: Store) -> str:
    """Return the first bad row: file, line, reason, and how the row begins; empty if there is none to show."""
    set_aside = (item for item in finished if any(output.path == QUARANTINED for output in item.receipt.outputs))
    item = next(set_aside, None)
    if item is None:
        return ""
    bad = orjson.loads(store.read(item.receipt, QUARANTINED).splitlines()[0])
    (origins,) = origins_of([item])
    origin, row = origin_of(origins, bad["row"])
    place = f"{origin.file}:{first_row(item.shard.part) + row + 1}"
    return f"{place}: {bad['reason']}: {bad['detail']}. The row begins: {bad['excerpt']}"


BENIGN = {
    *("blank_line", "empty_document", "too_short", "filtered", "oversize", "nothing_trained_in_pack"),
    *("exact_duplicate", "near_duplicate", "contaminated", "beyond_cap"),
}
"""Drops that are choices or conventions, not damage."""


def mix_of(blend: Blend, finished: Sequence[Finished]) -> Mix | None:
    """Return the solved budget of a blend, by the training tokens of finished shards.

    None if the blend has plain weights only. Raises InputError for a budget that cannot be kept.
    """
    if not blend.budgeted:
        return None
    held: Counter[str] = Counter()
    for item in finished:
        for part, count in item.receipt.parts.items():
            if item.split_of(part) == "train":
                held[item.shard.dataset] += count.tokens
    return solve(blend, held)


def mix_header(mix: Mix | None) -> dict[str, Any]:
    """Return the manifest's entry of a solved budget: the tokens to read of each dataset, by phase."""
    return {} if mix is None else {"phases": [{"name": each.name, "drawn": dict(each.drawn)} for each in mix.phases]}


def blend_weights(blend: Blend, mix: Mix | None = None) -> Weights:
    """Return the weight of each dataset, by `(split of the plan, name)`: in training, the tokens to read of it if there is a budget."""
    weights = {(split, source.name): source.weight for split, sources in blend.parts().items() for source in sources}
    if mix is None:
        return weights
    return weights | {place: mix.drawn(place[1]) for place in weights if place[0] in ("datasets", "train")}


def publish_preparation(
    output_dir: str,
    store: Store,
    finished: Sequence[Finished],
    layout: Layout,
    settings: PreparationSettings,
    header: Mapping[str, Any],
    volatile: Mapping[str, Any],
    last: Sequence[Finished] = (),
) -> Manifest:
    """Publish the finished shards in `output_dir` and return the manifest.

    `header` describes the preparation as a whole, `volatile` what may differ between equal runs, `last` a last round. Raises RunError, before
    anything is published, as `check_shrinkage` does.
    """
    with locked(output_dir) if is_local(output_dir) else nullcontext():
        counts = totals(finished, last)
        # Nothing is written yet, so a version that lost too much leaves the last one as it was.
        check_shrinkage(
            output_dir, settings, header, counts, "" if counts["documents"] else first_bad_row(finished, store)
        )
        own = _with_replaced(output_dir, {**layout.own, QUARANTINE: QUARANTINES})
        folders = [output_dir, *(join(output_dir, name) for name in own if name), store.place]
        for folder in filter(is_local, [*folders, join(store.place, "gates")]):
            sweep(folder)  # temporaries of killed runs; building a shard sweeps its folder
        published = layout.lay_out(output_dir, store, finished)
        files = [*published.files, *_publish_quarantine(output_dir, store, finished)]
        names = _relative(published.names, output_dir)
        derived_names = _relative(published.derived_names, output_dir)
        derived = {"derived": shard_entries(published.derived, derived_names)} if published.derived else {}
        record = {
            **header,
            **published.header,
            **shard_entries(finished, names),
            **derived,
            "totals": counts,
            "files": [asdict(file) for file in [described(BLEND, published.blend), *files]],
            "volatile": dict(volatile),
        }
        # Readers begin at blend.json: what it names is there before it, and what it no longer names goes after it.
        publish_bytes(join(output_dir, MANIFEST), sealed(record))
        publish_bytes(join(output_dir, BLEND), published.blend)
        everything = [*names.values(), *derived_names.values()]
        current = {name for of in everything for listed in of.values() for name in listed}
        _remove_stale(output_dir, own, current | {BLEND} | {file.path for file in files})
    return cast("Manifest", record)


@contextmanager
def failure_recorded(output_dir: str, header: Mapping[str, Any], store: str) -> Generator[None]:
    """If the block fails and nothing was published in `output_dir` before, write a manifest that records it."""
    started = time.time()
    try:
        yield
    except RunError as error:
        if published_manifest(output_dir) is None:
            volatile = {"created_at": time.time(), "seconds": time.time() - started, "store": store}
            failed = {**header, "status": FAILED, "error": str(error), "shards": [], "volatile": volatile}
            publish_bytes(join(output_dir, MANIFEST), sealed(failed))
        raise


def _with_replaced(output_dir: str, own: Mapping[str, re.Pattern[str]]) -> dict[str, re.Pattern[str]]:
    """Return `own`, and the names from earlier publications of other kinds. The manifest that lists these is kept until they are removed."""
    kept = join(output_dir, REPLACED)
    names = _published_before(output_dir, own)
    if names:
        copy(join(output_dir, MANIFEST), join(kept, MANIFEST))
    every: defaultdict[str, list[str]] = defaultdict(list)
    for found in (own, names, _published_before(kept, own), {REPLACED: re.compile(re.escape(MANIFEST))}):
        for folder, pattern in found.items():
            every[folder].append(pattern.pattern)
    return {folder: re.compile("|".join(patterns)) for folder, patterns in every.items()}


def _published_before(place: str, own: Mapping[str, re.Pattern[str]]) -> dict[str, re.Pattern[str]]:
    """The names in the manifest in `place` that `own` does not match, by folder. One without an ending is the prefix of files."""
    with suppress(InputError):
        manifest = published_manifest(place)
        if manifest is None:
            return {}
        entries = [*manifest["shards"], *derived_entries(manifest)]
        published = [name for entry in entries for names in entry["published"].values() for name in names]
        names = {*published, *(file["path"] for file in manifest.get("files", []))} - {BLEND}
        folders: defaultdict[str, list[str]] = defaultdict(list)
        for folder, _, name in sorted(name.rpartition("/") for name in names):
            known = folder in own and any(own[folder].fullmatch(each) for each in (name, f"{name}.bin"))
            if not known and not folder.startswith("/") and "://" not in folder and ".." not in folder.split("/"):
                folders[folder].append(re.escape(name) + ("" if "." in name else r"\.\w+"))
        return {folder: re.compile("|".join(found)) for folder, found in folders.items()}
    return {}


def described(path: str, data: bytes) -> Output:
    """Return the record of a file at `path` that holds `data`."""
    return Output(path, len(data), xxh3_128_hexdigest(data))


def _relative(names: Names, output_dir: str) -> Names:
    return {
        place: {split: [name.removeprefix(f"{output_dir}/") for name in listed] for split, listed in of.items()}
        for place, of in names.items()
    }


def parts_with_tokens(finished: Sequence[Finished]) -> Iterator[tuple[Finished, str, str]]:
    """Each part with tokens, with its split, in plan order."""
    for item in finished:
        for part, count in item.receipt.parts.items():
            if count.tokens:
                yield item, part, item.split_of(part)


def blend_json(listed: Sequence[Listed], weights: Weights) -> bytes:
    """Return the content of blend.json: per split a flat list of weight and name, or null for an empty split.

    A name's weight is its dataset's weight times its share of the dataset in that split, so the number of shards does not
    change how often a dataset is sampled. Datasets of weight 0 are omitted.
    """
    amounts: Counter[tuple[str, tuple[str, str]]] = Counter()
    for name in listed:
        amounts[name.split, name.dataset] += name.amount
    lists: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in listed:
        if weight := weights[name.dataset]:
            lists[name.split] += [repr(weight * (name.amount / amounts[name.split, name.dataset])), name.path]
    return orjson.dumps({split: entries or None for split, entries in lists.items()}, option=orjson.OPT_INDENT_2)


def _publish_quarantine(output_dir: str, store: Store, finished: Sequence[Finished]) -> list[Output]:
    """Write one file of bad rows per dataset, with file and line; return them with paths relative to the output folder.

    A shard numbers rows within its slice. Its line in the file also counts the rows in earlier slices.
    """
    groups: defaultdict[str, list[tuple[Finished, Sequence[Origin]]]] = defaultdict(list)
    for item, origins in zip(finished, origins_of(finished), strict=True):
        if item.receipt.quarantined:
            split = f"{item.shard.split}-" if item.shard.split in SPLITS else ""
            groups[f"{QUARANTINE}/{split}{item.shard.dataset}.jsonl"].append((item, origins))
    outputs: list[Output] = []
    for name, items in groups.items():
        with publish(join(output_dir, name)) as file:
            for item, origins in items:
                # Rows before a missing slice are counted in the file.
                uncounted = first_row(item.shard.part) if origins[0].before is None else 0
                for bad in map(orjson.loads, store.read(item.receipt, QUARANTINED).splitlines()):
                    origin, row = origin_of(origins, bad.pop("row"))
                    line = (uncounted if origin.before is None else origin.before) + row + 1
                    placed = {"file": origin.file, "line": line, **bad}
                    file.write(orjson.dumps(placed, option=orjson.OPT_APPEND_NEWLINE))
        outputs.append(replace(file.output, path=name))
    return outputs


def _remove_stale(output_dir: str, own: Mapping[str, re.Pattern[str]], current: set[str]) -> None:
    """Remove earlier names that this one lacks, and local folders and their parents that become empty.

    `current` are paths relative to the output folder, or prefixes of such paths.
    """
    for folder, pattern in own.items():
        place = join(output_dir, folder) if folder else output_dir
        system, path = filesystem(place)
        system.invalidate_cache(path)
        found: list[str] = []
        with suppress(FileNotFoundError):
            found = cast("list[str]", system.ls(path, detail=False))
        names = [name.rpartition("/")[2] for name in found]
        within = f"{folder}/" if folder else ""
        # blend.json names a pair by the prefix of its two files.
        kept = {name for name in names if {f"{within}{name}", f"{within}{name}".rpartition(".")[0]} & current}
        stale = [name for name in names if name not in kept and pattern.fullmatch(name)]
        for name in stale:
            system.rm_file(f"{path}/{name}")
        if is_local(place) and folder and stale and len(stale) == len(names):
            os.removedirs(path)


COMPARED = ("scale", "sample", "mode")
"""The settings that must be the same for two versions to be compared."""


def check_shrinkage(
    output_dir: str, settings: PreparationSettings, header: Mapping[str, Any], totals: Totals, bad: str
) -> None:
    """Raises RunError if nothing is left, or a dataset lost too much since the last version, as after a failed mount or a partial copy.

    The last version is the publication in the output folder, or the one that `previous` names, if it is of the same kind and share of
    the data. A dataset that the blend no longer lists was removed on purpose. `header` and `totals` belong to the new manifest, `bad` is the first bad row, if there is one.
    """
    listed = {
        f"{split}/{each['name']}": each["name"]
        for split, sources in listed_sources(header["blend"]).items()
        for each in sources
    }
    watched = {dataset: name for dataset, name in listed.items() if name not in settings.allow_shrink}
    if not watched:
        return
    if not totals["documents"]:
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in totals["dropped"].items()) or "none dropped"
        raise RunError(
            f"{counted(totals['rows'], 'row')} gave no documents ({dropped}), so nothing was published; check the sources, "
            "fields (text_field, messages_field), filters and size limits, or set "
            f"allow_shrink={_named(listed.values())} to publish anyway{bad and f'. The first bad row: {bad}'}"
        )
    place = settings.previous or output_dir
    before: Mapping[str, Any] = {}
    with suppress(InputError):  # a damaged manifest is replaced by publishing
        known = published_manifest(place)
        if known is not None and known["type"] == header["type"]:
            alike = all(known["settings"].get(name) == getattr(settings, name, None) for name in COMPARED)
            before = known["totals"]["datasets"] if alike else {}
    lost: dict[str, str] = {}
    for dataset, name in watched.items():
        was = before[dataset]["documents"] if dataset in before else 0
        found = totals["datasets"].get(dataset, {}).get("documents", 0)
        if was - found > settings.max_shrink_fraction * was:
            lost[name] = (
                f"dataset {dataset.removeprefix('datasets/')!r}: {counted(found, 'document')}, "
                f"{1 - found / was:.0%} fewer than the {was:,} of the last version"
            )
    if lost:
        raise RunError(
            f"{'; '.join(lost.values())}; the last version is {place}, and more than {settings.max_shrink_fraction:.0%} "
            f"(max_shrink_fraction) may not be lost, so nothing was published; check the sources, fields and filters, or set "
            f"allow_shrink={_named(lost)} to publish anyway"
        )


def _named(names: Iterable[str]) -> str:
    return f"[{', '.join(dict.fromkeys(names))}]"
