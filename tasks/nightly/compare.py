"""Compare a blend with its latest version: what changed, and the name of the next version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.report.why_fate import FOLLOWED
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.manifest import published_manifest
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.storage import absolute, join

from .blends import NightlyBlend, settings_of
from .reasons import file_changes, new_data_sets, reasons
from .versions import latest, lineage, next_version

STORE = "shards"
"""The store that all blends share; its name differs from every kind of preparation."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A blend, its latest version, the reasons for another (none if it is up to date), and the next version.

    `before` is the latest version, None before the first; `previous` is its folder if that exists; `named_files` are digests of
    the files that settings name.
    """

    blend: NightlyBlend
    settings: PreparationSettings
    output_dir: str
    before: str | None
    previous: str | None
    version: str
    reasons: list[str]
    named_files: Mapping[str, str]

    @property
    def path(self) -> str:
        """The folder of the next version."""
        return join(self.output_dir, self.version)

    @property
    def diff(self) -> str | None:
        """The command that compares the next version with its latest, document by document; None if there is nothing to compare."""
        comparable = self.previous and self.blend.kind in FOLLOWED
        return f"tokenmill diff {self.previous} {self.path}" if comparable else None

    @property
    def chosen(self) -> dict[str, Any]:
        """The explicitly set settings, and the version to compare with."""
        chosen = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return {**chosen, "previous": self.previous}


def store_of(output_dir: str) -> str:
    """The store of the shards of all blends."""
    return join(absolute(output_dir), STORE)


def compare_blend(blend: NightlyBlend, output_dir: str, under: Mapping[str, Any], now: float) -> Comparison:
    """Compare a blend with its latest version below `output_dir`; `under` are default settings.

    Costs a listing of the sources, and for new or touched files the footers of Parquet and a hash of local files. `now` is a
    Unix time. Raises InputError for anything that must be fixed first.
    """
    settings = settings_of(blend, store_of(output_dir), under)
    loaded = load_blend(blend.path)
    of_blend = join(absolute(output_dir), blend.name)
    newest = latest(of_blend)
    kind = preparation(blend.kind)
    named_files = kind.named_files(settings)
    # A version is up to date if its manifest matches the sources, so receipts are not read.
    planned = kind.plan(loaded, settings.model_copy(update={"force": True}), of_blend)
    manifest = published_manifest(newest.path) if newest else None
    if newest is None:
        why = new_data_sets(loaded)
    elif manifest is None:
        why = [f"the latest version, {newest.version}, is no longer there"]
    else:
        why = [*reasons(manifest, planned), *file_changes(newest.named_files, named_files)]
    before, previous = (newest.version, newest.path if manifest else None) if newest else (None, None)
    version = next_version([*lineage(of_blend), *([before] if before else [])], now)
    return Comparison(blend, settings, of_blend, before, previous, version, why, named_files)
