"""Build one shard of a filtered blend: the rows in a slice that pass every rule, and the fates of all.

Kept rows are copied byte for byte, as in deduplication. Only a row whose text changes, because personal data is masked or lines are
removed, is written again: a JSON row without blanks between its values, a Parquet row with only its text replaced.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.dedup.apply import Content, SliceRows, kept_rows, read_rows, write_rows
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact, loads
from tokenmill.tasks.sources.files import BadRow
from tokenmill.tasks.sources.json_rows import excerpt, field_path

from .models import Labelled, failing
from .personal import total, treat
from .rules import judge
from .settings import C4Quality, Family, FineWebQuality, GopherQuality, GopherRepetition, PersonalData

FAMILIES: Mapping[Family, Any] = {
    "gopher_repetition": GopherRepetition,
    "gopher_quality": GopherQuality,
    "c4": C4Quality,
    "fineweb": FineWebQuality,
}


@dataclass(frozen=True, slots=True)
class FilterRecipe:
    """Every setting that can change a byte of a shard: the families of rules in use, in their order, models by the hash of
    their content, and the treatment of personal data, None without any.
    """

    text_field: str
    rules: Sequence[Mapping[str, Any]]
    models: Sequence[Labelled]
    personal: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Decided:
    """Why each of n texts is dropped (a string [n], empty for kept ones), the texts to write, and counts for the receipt:
    what personal data was found, and the lines that were removed, by reason.
    """

    reasons: np.ndarray
    texts: pa.LargeStringArray
    personal: Mapping[str, Mapping[str, int]]
    lines: Mapping[str, int]


def filter_shard(shard: PlannedShard, store: Store, paths: Mapping[str, str], on_bad_row: OnBadRow) -> Receipt:
    """Build one shard of rows that pass; `paths` are the model paths, by content hash.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source or a model has changed since the plan.
    """
    recipe = shard.identity["recipe"]
    found = list[Decided]()
    with building(shard, store, on_bad_row) as builder:
        for rows in read_rows(shard.part, recipe["text_field"]):
            decided = decide(rows.texts, recipe, paths)
            stay = decided.reasons == ""
            content, kept, rejected = _changed(rows, decided.texts, stay, field_path(recipe["text_field"]))
            builder.count(rows, rejected)
            builder.drop_each(decided.reasons[~stay], rows.rows[~stay])
            write_rows(builder, kept_rows(content, pa.array(kept)), rows.rows[kept])
            # The findings are kept, and the texts of a batch are not.
            found.append(Decided(decided.reasons[:0], decided.texts[:0], decided.personal, decided.lines))
        builder.write_fates()
        if personal := total([each.personal for each in found]):
            builder.facts["personal"] = personal
        if lines := dict(sum((Counter(each.lines) for each in found), Counter())):
            builder.facts["removed_lines"] = lines
    return builder.receipt


def decide(texts: pa.LargeStringArray, recipe: Mapping[str, Any], paths: Mapping[str, str]) -> Decided:
    """Judge texts by families of rules, then by models, then by personal data; each sees only the texts that have passed."""
    families: dict[Family, Any] = {}
    for rules in recipe["rules"]:
        thresholds = {name: value for name, value in rules.items() if name != "family"}
        families[rules["family"]] = FAMILIES[rules["family"]](**thresholds)
    verdicts = judge(texts, families)
    reasons, texts = verdicts.reasons, verdicts.texts
    for model in (Labelled(**each) for each in recipe["models"]):
        stay = np.flatnonzero(reasons == "")
        reasons[stay[failing(texts.take(pa.array(stay)), model, paths)]] = model.reason
    if not recipe["personal"]:
        return Decided(reasons, texts, {}, verdicts.lines)
    passed = reasons == ""  # personal data of dropped texts isn't counted
    treated = treat(texts.filter(pa.array(passed)), PersonalData(**recipe["personal"]))
    reasons[passed] = treated.reasons
    texts = compute.call_function("replace_with_mask", [texts, pa.array(passed), treated.texts])
    return Decided(reasons, texts, treated.found, verdicts.lines)


def _changed(
    rows: SliceRows, texts: pa.LargeStringArray, stay: np.ndarray, path: Sequence[str]
) -> tuple[Content, np.ndarray, list[BadRow]]:
    """The rows with changed texts in place, which of them to write (bool [n]), and those that cannot be written again."""
    changed = np.flatnonzero(stay & np.asarray(compute.call_function("not_equal", [texts, rows.texts])))
    if not len(changed):  # rows keep their bytes
        return rows.content, stay, []
    if not isinstance(rows.content, list):
        number = rows.content.schema.get_field_index(path[0])
        column = _replaced(rows.content.column(number), texts, path[1:])
        return rows.content.set_column(number, rows.content.schema.field(number), column), stay, []
    content, kept, rejected = list(rows.content), stay.copy(), list[BadRow]()
    for number in changed.tolist():
        try:
            record = inner = loads(content[number])
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = texts[number].as_py()
            content[number] = compact(record)
        except (ValueError, TypeError) as error:  # of rows with so many levels that they cannot be written again
            kept[number] = False
            bad = BadRow(int(rows.rows[number]), "cannot_be_changed", str(error), excerpt(content[number]))
            rejected.append(bad)
    return content, kept, rejected


def _replaced(column: pa.Array, texts: pa.LargeStringArray, path: Sequence[str]) -> pa.Array:
    """A column, or a struct with one, that holds other texts and has the same type."""
    if not path:
        kind = column.type
        return (
            texts.cast(kind.value_type).dictionary_encode().cast(kind)
            if pa.types.is_dictionary(kind)
            else texts.cast(kind)
        )
    fields = [column.type.field(number) for number in range(column.type.num_fields)]
    inner = column.flatten()
    number = column.type.get_field_index(path[0])
    inner[number] = _replaced(inner[number], texts, path[1:])
    return cast("pa.Array", pa.StructArray.from_arrays(inner, fields=fields))
