"""Plan a Harmony normalization: from a blend and settings to shards with identities, without Prefect and Dask."""

from collections.abc import Sequence
from dataclasses import asdict

from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.shards.kind import Planned
from tokenmill.tasks.shards.planning import places, plan_shards, require_no
from tokenmill.tasks.shards.receipt import recipe_of
from tokenmill.tasks.sources.discovery import name_within
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import without_ending
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.sources.selection import named_splits, without_number

from .converters import CONVERTERS, PROOF_TASKS, converter_for
from .message import TEMPLATE_VERSION
from .semantics import CODES
from .settings import HarmonyRecipe, HarmonySettings, policy_of

KIND = "harmony"
FORMAT_VERSION = 7  # increment it when the same recipe and source give different bytes

EVERY_FIELD: Sequence[str] = ()


def plan_harmony(blend: Blend, settings: HarmonySettings, output_dir: str | None) -> Planned[HarmonySettings, None]:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are cached per user.

    Raises InputError for anything that must be fixed first.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    require_choices(blend, settings)
    parts: dict[str, list[DataSource]] = {split: [] for split in blend.parts()}
    for split, sources in blend.parts().items():
        for source in sources:
            name = source.converter or converter_for(source.path)
            proofs = name == "math_proofs" and source.converter is None
            # Proofs that are read in two ways become two datasets, because each pass accounts for every row.
            for number, each in enumerate(PROOF_TASKS[settings.proofs] if proofs else (name,)):
                named = f"{source.name}-{number}" if number else source.name
                parts[split].append(source.model_copy(update={"converter": each, "name": named}))
    blend = Blend.model_validate(parts)

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[HarmonyRecipe]:
        files = [name_within(source.path, part.file.uri) for part in slices]
        splits = splits_of(source, files)
        return [
            _recipe(source, split, settings, part, file, splits[file]) for part, file in zip(slices, files, strict=True)
        ]

    # The ids of rows have the file and the row in it.
    plan = plan_shards(
        blend, settings, store, FORMAT_VERSION, lambda _: EVERY_FIELD, require_any, recipes, bundles=False
    )
    return Planned(blend, settings, output_dir, plan, None)


def require_choices(blend: Blend, settings: HarmonySettings) -> None:
    """Raises InputError for an unknown converter or rule, and for keys that do not apply here."""
    # A rule that doesn't exist would be switched off without effect.
    for code in settings.disabled_rules:
        if code not in CODES:
            raise InputError(f"disabled_rules: {code!r} is not a rule; {nearest(code, CODES)}")
    for sources in blend.parts().values():
        for source in sources:
            require_no(source, ["transforms", "fim", "template_variables"], "Harmony")
            if source.converter is not None and source.converter not in CONVERTERS:
                raise InputError(
                    f"dataset {source.name!r}: unknown converter {source.converter!r}; "
                    f"{nearest(source.converter, CONVERTERS)}"
                )


def _recipe(
    source: DataSource, blend_split: str, settings: HarmonySettings, part: Slice, file: str, split: str
) -> HarmonyRecipe:
    return recipe_of(
        HarmonyRecipe,
        settings,
        dataset=source.name,
        blend_split=blend_split if blend_split in SPLITS else None,
        split=split,
        file=f"{file}@{part.start}" if part.start else file,
        converter=source.converter or "",
        messages_field=source.messages_field,
        tools_field=source.tools_field,
        fields=source.named_fields,
        filters=row_filter(source).wanted,
        policy=asdict(policy_of(settings)),
        rules_off=sorted(settings.disabled_rules),
        template_version=TEMPLATE_VERSION,
    )


def splits_of(source: DataSource, files: Sequence[str]) -> dict[str, str]:
    """Return the split of each file of a dataset: the dataset's own, the one that the paths name, or else the file's name.

    A name counts up to its first dot, and without the number of a part.
    """
    # Parts of one split, `high.part_00.jsonl` and `high.part_01.jsonl`, have one name.
    stems = {file: without_number(without_ending(file).rpartition("/")[2]).partition(".")[0] for file in files}
    if source.split is not None:
        return dict.fromkeys(stems, source.split)
    named = named_splits([*stems])
    return stems | {file: split for split, found in named.items() for file in found}
