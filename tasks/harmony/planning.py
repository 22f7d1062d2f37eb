"""Plan a Harmony normalization: from a blend and settings to shards with identities, without Prefect and Dask."""

from collections.abc import Sequence
from dataclasses import asdict

from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.preparation import Planned
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter

from .converters import CONVERTERS, PROOF_TASKS, converter_for
from .message import TEMPLATE_VERSION
from .semantics import CODES
from .settings import HarmonyRecipe, HarmonySettings, policy_of

KIND = "harmony"
FORMAT_VERSION = 4
"""Increment it when the same recipe and source give different bytes."""

EVERY_FIELD: Sequence[str] = ()


HarmonyPlan = Planned[HarmonySettings, None]


def plan_harmony(blend: Blend, settings: HarmonySettings, output_dir: str | None) -> HarmonyPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are cached per user.

    Raises InputError for anything that must be fixed first.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    require_choices(blend, settings)
    blend = _with_converters(blend, settings)

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[HarmonyRecipe]:
        return [_recipe(source, split, settings, part) for part in slices]

    # The ids of rows have the file and the row in it.
    plan = plan_shards(
        blend, settings, store, FORMAT_VERSION, lambda _: EVERY_FIELD, require_any, recipes, bundles=False
    )
    return Planned(blend, settings, output_dir, plan, None)


def require_choices(blend: Blend, settings: HarmonySettings) -> None:
    """Raises InputError for an unknown converter or rule, and for keys that do not apply here."""
    for code in settings.rules_off:
        if code not in CODES:
            raise InputError(f"rules_off: {code!r} is not a rule; {nearest(code, CODES)}")
    for sources in blend.parts().values():
        for source in sources:
            require_no(source, ["transforms", "fim"], "Harmony")
            if source.converter is not None and source.converter not in CONVERTERS:
                raise InputError(
                    f"data set {source.name!r}: there is no converter {source.converter!r}; "
                    f"{nearest(source.converter, CONVERTERS)}"
                )


def _with_converters(blend: Blend, settings: HarmonySettings) -> Blend:
    """The blend with a converter set for every data set; a data set of proofs becomes two if they are read in two ways."""
    parts = {
        split: [each for source in sources for each in _converted(source, settings)]
        for split, sources in blend.parts().items()
    }
    return Blend.model_validate(parts)


def _converted(source: DataSource, settings: HarmonySettings) -> list[DataSource]:
    name = source.converter or converter_for(source.path)
    passes = PROOF_TASKS[settings.proofs] if name == "math_proofs" and source.converter is None else (name,)
    return [
        source.model_copy(update={"converter": each, "name": f"{source.name}-{number}" if number else source.name})
        for number, each in enumerate(passes)
    ]


def _recipe(source: DataSource, split: str, settings: HarmonySettings, part: Slice) -> HarmonyRecipe:
    file = name_within(source.path, part.file.uri)
    return HarmonyRecipe(
        dataset=source.name,
        blend_split=split if split in SPLITS else None,
        split=split_of(source, part),
        file=f"{file}@{part.start}" if part.start else file,
        converter=source.converter or "",
        filters=row_filter(source).wanted,
        policy=asdict(policy_of(settings)),
        rules_off=sorted(settings.rules_off),
        min_completion_chars=settings.min_completion_chars,
        cross_check=settings.cross_check,
        messages_json=settings.messages_json,
        template_version=TEMPLATE_VERSION,
    )


def split_of(source: DataSource, part: Slice) -> str:
    """The split of a slice: the data set's own, else its file name up to the first dot."""
    return source.split or part.file.uri.rpartition("/")[2].partition(".")[0]
