"""Nightly blends: a folder per preparation kind, with each blend's settings next to it.

    BLENDS/pretrain/web.json        the blend pretrain/web
    BLENDS/pretrain/web.yaml        its settings, as for `tokenmill pretrain --config`; optional
    BLENDS/pretrain/defaults.yaml   settings for every blend in this folder; optional
    BLENDS/sft/chat.json            …

The folder names the preparation kind, so blend files are the same as elsewhere. JSON or YAML files that do not fit this
layout fail by name: a misspelt folder must not leave a blend unprepared, and settings in `web.yml` must not be ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob
from typing import Any, cast

from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.shards.kinds import KINDS as PREPARATIONS
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, filesystem, is_local, join
from tokenmill.tasks.strict import parse
from tokenmill.tasks.yaml_text import read_yaml, require_mapping

KINDS = [name for name, kind in PREPARATIONS.items() if kind.nightly]  # preparation kinds with nightly updates
DEFAULTS = "defaults"
ENDINGS = ("json", "yaml", "yml")


@dataclass(frozen=True, slots=True)
class NightlyBlend:
    """A blend below `prefix`; `name` is its path there without the extension: `pretrain/web`.

    `misnamed` is a settings file with the wrong extension.
    """

    prefix: str
    name: str
    misnamed: str | None = None

    @property
    def kind(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def path(self) -> str:
        return join(self.prefix, f"{self.name}.json")


def find_blends(prefix: str) -> list[NightlyBlend]:
    """Every blend below a folder or URI, by name. Settings without a blend count as one whose blend is missing.

    Raises InputError without blends.
    """
    prefix = absolute(prefix)
    system, path = filesystem(prefix)
    if is_local(prefix):
        found = set(glob("**/*", root_dir=path, recursive=True))  # noqa: PTH207 - pathlib's doesn't follow links to folders
    else:
        system.invalidate_cache()  # a run that goes on for weeks lists the same folder every night
        found = {each[len(path) :].strip("/") for each in cast("list[str]", system.find(path))}
    visible = (each for each in found if not each.startswith(".") and "/." not in each)
    names = {name for name, _, ending in (each.rpartition(".") for each in visible) if ending in ENDINGS}
    blends: list[NightlyBlend] = []
    for name in sorted(names):
        folder, _, own = name.rpartition("/")
        if own != DEFAULTS:
            misnamed = (f"{each}.yml" for each in (name, join(folder, DEFAULTS)) if f"{each}.yml" in found)
            blends.append(NightlyBlend(prefix, name, next((join(prefix, each) for each in misnamed), None)))
    if not blends:
        raise InputError(f"{prefix}: no blends here; name them KIND/NAME.json, where KIND is one of {', '.join(KINDS)}")
    return blends


def settings_of(blend: NightlyBlend, store: str, under: Mapping[str, Any]) -> PreparationSettings:
    """Return the settings of a blend: its own override its folder's defaults, which override `under`.

    Raises InputError for a folder that isn't a preparation kind, and for invalid settings.
    """
    if blend.kind not in KINDS:
        where = f"{blend.kind!r}, which" if blend.kind else f"{blend.prefix} itself, which"
        raise InputError(
            f"{blend.path}: is in {where} isn't a preparation kind; {nearest(blend.kind, KINDS)}; move it there"
        )
    if blend.misnamed:
        raise InputError(f"{blend.misnamed}: settings are read from files that end in .yaml; rename it")
    written = dict(under)
    for name in (join(blend.kind, DEFAULTS), blend.name):
        place = join(blend.prefix, f"{name}.yaml")
        given = read_yaml(read_bytes(place) or b"", f"{place}: not valid YAML")
        written = written if given is None else _merged(written, require_mapping(given, place))
    # What a nightly run chooses itself
    if "store" in written:
        raise InputError(f"{blend.name}: all blends share the store {store}; remove 'store' from the settings")
    if "previous" in written:
        raise InputError(
            f"{blend.name}: a nightly run compares with the latest version; remove 'previous' from the settings"
        )
    return parse(preparation(blend.kind).settings, {**written, "store": store}, f"settings of {blend.name}")


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    shared = [name for name in over if isinstance(under.get(name), Mapping) and isinstance(over[name], Mapping)]
    return {**under, **over, **{name: _merged(under[name], over[name]) for name in shared}}
