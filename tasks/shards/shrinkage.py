"""Prevent the publication of a dataset that shrank.

After a failed mount, a partial copy or a filter that never matches, every row read is accounted for, but the result is
useless for training. So publication fails without documents, or if a dataset lost more than `max_shrink_fraction` of its
documents since the last version. `allow_shrink` names exceptions.

The last version is the publication in the output folder, or the one that `previous` names. Only equal preparations are
compared: same kind, same share of the data (`scale`, `sample`), same `mode` of deduplication. A dataset that the blend no
longer lists was removed on purpose.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from tokenmill.tasks.blend.models import listed_sources
from tokenmill.tasks.errors import InputError, RunError

from .manifest import published_manifest
from .settings import PreparationSettings

COMPARED = ("scale", "sample", "mode")
"""The settings that must be the same for two versions to be compared."""


def check_shrinkage(
    output_dir: str, settings: PreparationSettings, header: Mapping[str, Any], totals: Mapping[str, Any], bad: str
) -> None:
    """Raises RunError if nothing is left, or a dataset lost too much since the last version.

    `header` and `totals` belong to the new manifest, `bad` is the first bad row, if there is one.
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
        raise RunError(
            f"{totals['rows']:,} rows gave no documents ({_dropped(totals)}), so nothing was published; check the sources, "
            "fields (text_field, messages_field), filters and size limits, or set "
            f"allow_shrink={_named(listed.values())} to publish anyway{bad and f'. The first bad row: {bad}'}"
        )
    place = settings.previous or output_dir
    before = _comparable(place, header, settings)
    lost = {name: loss for dataset, name in watched.items() for loss in _loss(dataset, before, totals, settings)}
    if lost:
        raise RunError(
            f"{'; '.join(lost.values())}; the last version is {place}, and more than {settings.max_shrink_fraction:.0%} "
            f"(max_shrink_fraction) may not be lost, so nothing was published; check the sources, fields and filters, or set "
            f"allow_shrink={_named(lost)} to publish anyway"
        )


def _comparable(place: str, header: Mapping[str, Any], settings: PreparationSettings) -> Mapping[str, Any]:
    """The totals of each dataset published at `place`, by `split/name`; empty if the two are not comparable."""
    with suppress(InputError):  # a damaged manifest is replaced by publishing
        before = published_manifest(place)
        if before is not None and before["type"] == header["type"]:
            chosen = before["settings"]
            if all(chosen.get(name) == getattr(settings, name, None) for name in COMPARED):
                return before["totals"]["datasets"]
    return {}


def _loss(
    dataset: str, before: Mapping[str, Any], totals: Mapping[str, Any], settings: PreparationSettings
) -> Iterator[str]:
    """The loss of a dataset, if it is too large."""
    was = before[dataset]["documents"] if dataset in before else 0
    found = totals["datasets"].get(dataset, {}).get("documents", 0)
    if was - found > settings.max_shrink_fraction * was:
        name = dataset.removeprefix("datasets/")
        noun = "document" if found == 1 else "documents"
        yield f"dataset {name!r}: {found:,} {noun}, {1 - found / was:.0%} fewer than the {was:,} of the last version"


def _dropped(totals: Mapping[str, Any]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in totals["dropped"].items()) or "none dropped"


def _named(names: Iterable[str]) -> str:
    return f"[{', '.join(dict.fromkeys(names))}]"
