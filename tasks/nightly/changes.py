"""Why the next version of a blend differs from the last: settings and datasets field by field, files one by one.

    settings: pack_size 4096 -> 8192
    web: weight 1.0 -> 2.0
    web: 2 files new (b.jsonl, c.jsonl), 1 grown (a.jsonl: 10.3 MB -> 12.0 MB), 1 gone (z.jsonl)
    14 shards: recipe.tokenizer changed: 'xxh3_128:1…' -> 'xxh3_128:2…'

The last manifest is compared with the current plan. Identities are compared by key, at the cost of one hash per shard. A file
is identified by the content of its slices; its size is the end of its last slice, in bytes or in row groups of Parquet.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS, listed_sources
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.kind import Planned
from tokenmill.tasks.shards.manifest import entry_files, identities
from tokenmill.tasks.shards.plan import changes
from tokenmill.tasks.shards.receipt import difference, shard_key
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import RUNTIME_SETTINGS
from tokenmill.tasks.sources.formats import FORMATS

MAX_NAMED = 3


@dataclass(slots=True)
class _File:
    row_groups: bool
    slices: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    """Content by bounds, in bytes or row groups."""

    @property
    def end(self) -> int:
        return max(stop for _, stop in self.slices)


Files = Mapping[str, Mapping[str, _File]]  # files by dataset (`split/name`) and URI


def plan_changes(manifest: Manifest, planned: Planned[Any, Any]) -> list[str]:
    """Why a plan differs from the published manifest; empty if it does not."""
    before, plan = identities(manifest), planned.plan
    keys = {shard.place: key for shard, key in zip(plan.shards, plan.keys, strict=True)}
    # A place is a slice of a file in a dataset; what is built of it has a key
    changed = {place for place, identity in before.items() if keys.get(place) != shard_key(identity)}
    added = keys.keys() - before.keys()
    settings = planned.settings.model_dump(exclude=RUNTIME_SETTINGS)
    blend = _plain(planned.blend.model_dump(exclude_none=True))
    found = [
        *_fields("settings", manifest["settings"], _plain(settings)),
        *_fields("budget", _budget(manifest["blend"]), _budget(blend)),
        *_data_set_changes(manifest["blend"], blend),
    ]
    if changed or added:
        after = {shard.place: shard.identity for shard in plan.shards if shard.place in changed}
        listed = _files(
            (f"{shard.split}/{shard.dataset}", part.file.uri, part.start, part.stop, part.file.format, part.content)
            for shard in plan.shards
            for part in shard.part.members or [shard.part]
        )
        # Beside files, only a change of the recipe gives the same slice a new shard
        recipes: Counter[str] = Counter()
        for place, identity in after.items():
            recipes.update(changes({**before[place], "source": None}, {**_plain(identity), "source": None}))
        found += _file_changes(_published_files(manifest), listed)
        found += [f"{counted(count, 'shard')}: {change}" for change, count in recipes.most_common()]
    if not found and (changed or added):
        gone = len(changed - keys.keys())
        return [f"shards: {len(added)} new, {len(changed) - gone} changed, {gone} gone"]
    reordered = list(_sources(manifest["blend"])) != list(_sources(blend))
    return found or (["the order of the datasets changed"] if reordered else [])


def manifest_changes(before: Manifest, after: Manifest, renamed: Mapping[str, str]) -> list[str]:
    """Changes from one publication to the next in settings, datasets, files and tokenizer.

    `renamed` has the new name of each dataset (`split/name`) that both have.
    """
    names = {old: new for old, new in renamed.items() if old != new}
    old = {
        split: [
            {**source, "name": names.get(f"{split}/{source['name']}", f"/{source['name']}").partition("/")[2]}
            for source in sources
        ]
        for split, sources in listed_sources(before["blend"]).items()
    }
    files = {names.get(name, name): listed for name, listed in _published_files(before).items()}
    prints = [each.get("tokenizer", {}).get("fingerprint") for each in (before, after)]
    return [
        *(f"{_label(name)}: renamed to {_label(new)}" for name, new in names.items()),
        *_fields("settings", before["settings"], after["settings"]),
        *([f"tokenizer: {prints[0]} -> {prints[1]}"] if prints[0] != prints[1] else []),
        *_fields("budget", _budget(before["blend"]), _budget(after["blend"])),
        *_data_set_changes(old, after["blend"]),
        *_file_changes(files, _published_files(after)),
    ]


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON of any shape
    """A value after a round trip through JSON: lists instead of tuples."""
    return orjson.loads(orjson.dumps(value))


def _fields(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name, (old, new) in difference(before, after).items():
        yield f"{what}: {name} {old!r} -> {new!r}"


def _sources(blend: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {f"{split}/{source['name']}": source for split, listed in listed_sources(blend).items() for source in listed}


def _budget(blend: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a blend that apply to all datasets together."""
    return {name: value for name, value in blend.items() if name not in ("datasets", *SPLITS)}


def _data_set_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = _sources(before), _sources(after)
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            yield f"{_label(name)}: the dataset is gone"
        elif name not in old:
            yield f"{_label(name)}: the dataset is new"
        else:
            yield from _fields(_label(name), old[name], new[name])


def _label(dataset: str) -> str:
    """`datasets/web` of a flat blend as `web`."""
    return dataset.removeprefix("datasets/")


def _published_files(manifest: Manifest) -> Files:
    return _files(
        (f"{entry['split']}/{entry['dataset']}", file["file"], file["start"], file["stop"], entry["source"]["format"], file["content"])
        for entry in manifest["shards"]
        for file in entry_files(entry)
    )  # fmt: skip


def _files(slices: Iterable[tuple[str, str, int, int, str, str]]) -> Files:
    """Return the files that contain slices, given as dataset, URI, start, stop, format and content."""
    found: defaultdict[str, dict[str, _File]] = defaultdict(dict)
    for dataset, uri, start, stop, kind, content in slices:
        file = found[dataset].setdefault(uri, _File(row_groups=FORMATS[kind].columnar))
        file.slices[start, stop] = content
    return found


def _file_changes(before: Files, after: Files) -> Iterator[str]:
    """The new, grown, shrunk, changed and removed files of each dataset in both versions."""
    for dataset in [dataset for dataset in after if dataset in before]:
        old, new = before[dataset], after[dataset]
        changed: dict[str, list[str]] = {what: [] for what in ("new", "grown", "shrunk", "changed", "gone")}
        for uri, file in new.items():
            name, was = uri.rpartition("/")[2], old.get(uri)
            if was is None:
                changed["new"].append(name)
            elif file.end != was.end:
                changed["grown" if file.end > was.end else "shrunk"].append(f"{name}: {_sizes(was, file)}")
            # Slices with other bounds have another content anyway, so only those that both have are compared.
            elif any(content != file.slices.get(place, content) for place, content in was.slices.items()):
                changed["changed"].append(name)
        changed["gone"] = [uri.rpartition("/")[2] for uri in old if uri not in new]
        found: list[str] = []
        for what, names in ((what, names) for what, names in changed.items() if names):
            noun = "" if what != "new" else "file " if len(names) == 1 else "files "
            shown = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
            found.append(f"{len(names):,} {noun}{what} ({shown})")
        if found:
            yield f"{_label(dataset)}: {', '.join(found)}"


def _sizes(old: _File, new: _File) -> str:
    if new.row_groups:
        return f"{old.end} -> {new.end} row groups"
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    sizes = [
        next((f"{end / size:.1f} {unit}" for unit, size in units if end >= size), f"{end} bytes")
        for end in (old.end, new.end)
    ]
    # Sizes that round to the same one are shown in bytes
    return " -> ".join(sizes if sizes[0] != sizes[1] else [f"{old.end:,}", f"{new.end:,} bytes"])
