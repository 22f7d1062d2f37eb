"""The kinds of preparation that are kept up to date: how each is planned, and which files its settings name.

A plan says by content what its shards are made from: sources, tokenizer, template, tables. What is made of the shards
afterwards may depend on further files; `named_files` tells what is in those, so that a change there is seen as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.dedup.contamination import find_evaluations
from tokenmill.tasks.harmony.planning import plan_harmony
from tokenmill.tasks.pack.planning import plan_sft
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.rl.planning import plan_rl
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.select.planning import pools_of
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.shards.manifest import MANIFEST
from tokenmill.tasks.shards.plan import Plan
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.tokenize.planning import plan_pretrain
from tokenmill.tasks.tokenize.settings import PretrainSettings
from xxhash import xxh3_128_hexdigest


class Planned(Protocol):
    """What every kind of preparation plans."""

    @property
    def blend(self) -> Blend:
        """The blend, as the manifest will have it."""
        ...

    @property
    def settings(self) -> PreparationSettings:
        """The settings it was planned with."""
        ...

    @property
    def plan(self) -> Plan:
        """The shards."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """How blends of a kind are planned, and a digest of each group of files that their settings name."""

    settings: type[PreparationSettings]
    plan: Callable[[Blend, Any, str], Planned]
    named_files: Callable[[Any], Mapping[str, str]]


def _none(_settings: PreparationSettings) -> Mapping[str, str]:
    return {}


def _named_by_harmony(settings: NormalizationSettings) -> Mapping[str, str]:
    """The pools, the evaluations (read whole, a few megabytes as a rule), and the manifests of folders of scores."""
    pools, scores = pools_of(settings.selection), settings.selection.scores
    evaluations = find_evaluations(settings.dedup.evaluations)
    return {
        "selection.pools": _digest(
            [
                [predicate.text for predicate in pools.base],
                [[pool.name, pool.predicate.text] for pool in pools.pools],
            ]
        ),
        "selection.scores": _digest(
            [xxh3_128_hexdigest(read_bytes(join(absolute(place), MANIFEST)) or b"") for place in scores]
        ),
        "dedup.evaluations": _digest([[file.name, file.text_field, file.part.content] for file in evaluations]),
    }


def _digest(value: object) -> str:
    return xxh3_128_hexdigest(orjson.dumps(value))


KINDS: Mapping[str, Kind] = {
    "pretrain": Kind(PretrainSettings, plan_pretrain, _none),
    "sft": Kind(SftSettings, plan_sft, _none),
    "rl": Kind(RlSettings, plan_rl, _none),
    "harmony": Kind(NormalizationSettings, plan_harmony, _named_by_harmony),
}
"""By the names of their commands, which are the names of the folders that blends stand in."""


def planned_now(kind: str, blend: Blend, settings: PreparationSettings, output_dir: str) -> Planned:
    """The plan of a blend without a look at what is built: a listing, and footers and hashes of what is new.

    Receipts are not read, because whether a version is up to date is between its manifest and the sources.
    """
    unread = settings.model_copy(update={"force": True})
    return KINDS[kind].plan(blend, unread, output_dir)
