"""A data set that shrank: what must not pass for done although every row that was read is accounted for.

A mount that failed, a folder half copied or a filter that matches nothing loses no row that is there, and yet nobody
wants to train on what is left. So a preparation without a document is refused, and so is one in which a data set has
lost more than `shrink_ceiling` of its documents since the last version; `allow_shrink` names the data sets that may.

The last version is the publication that stands in the output folder, or the one that `previous` names. Only like is
compared with like: the same kind of preparation, of the same share of the data (`scale`, `sample`), with duplicates or
without them (`mode`). A data set that the blend no longer lists was removed on purpose.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from tokenmill.tasks.errors import InputError, RunError

from .manifest import published_manifest
from .settings import PreparationSettings

COMPARED = ("scale", "sample", "mode")
"""The settings that must be the same for two versions to be compared."""


def check_shrinkage(
    output_dir: str, settings: PreparationSettings, header: Mapping[str, Any], totals: Mapping[str, Any]
) -> None:
    """Raises RunError when nothing is left, or less of a data set than the last version lets expect.

    `header` and `totals` are those of the manifest to be.
    """
    listed = {f"{split}/{each['name']}": each["name"] for split, sources in header["blend"].items() for each in sources}
    watched = {dataset: name for dataset, name in listed.items() if name not in settings.allow_shrink}
    if not watched:
        return
    if not totals["documents"]:
        raise RunError(
            f"no documents came of {totals['rows']:,} rows ({_dropped(totals)}), so nothing was published; check the "
            f"sources, fields and filters, or set allow_shrink={_named(listed.values())} to publish all the same"
        )
    place = settings.previous or output_dir
    before = _comparable(place, header, settings)
    lost = {name: said for dataset, name in watched.items() for said in _loss(dataset, before, totals, settings)}
    if lost:
        raise RunError(
            f"{'; '.join(lost.values())}; the last version is {place}, and more than {settings.shrink_ceiling:.0%} "
            f"(shrink_ceiling) may not be lost, so nothing was published; check the sources, fields and filters, or set "
            f"allow_shrink={_named(lost)} to publish all the same"
        )


def _comparable(place: str, header: Mapping[str, Any], settings: PreparationSettings) -> Mapping[str, Any]:
    """The books of each data set of the publication at `place`, by `split/name`; none where it says nothing of this one."""
    with suppress(InputError):  # a damaged manifest tells nothing, and publishing replaces it
        before = published_manifest(place)
        if before is not None and before["type"] == header["type"]:
            chosen = before["settings"]
            if all(chosen.get(name) == getattr(settings, name, None) for name in COMPARED):
                return before["totals"]["datasets"]
    return {}


def _loss(
    dataset: str, before: Mapping[str, Any], totals: Mapping[str, Any], settings: PreparationSettings
) -> Iterator[str]:
    """What a data set lost, in words, where that is too much."""
    was = before[dataset]["documents"] if dataset in before else 0
    found = totals["datasets"].get(dataset, {}).get("documents", 0)
    if was - found > settings.shrink_ceiling * was:
        name = dataset.removeprefix("datasets/")
        noun = "document" if found == 1 else "documents"
        yield f"data set {name!r}: {found:,} {noun}, {1 - found / was:.0%} fewer than the {was:,} of the last version"


def _dropped(totals: Mapping[str, Any]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in totals["dropped"].items()) or "there were none"


def _named(names: Iterable[str]) -> str:
    return f"[{', '.join(dict.fromkeys(names))}]"
