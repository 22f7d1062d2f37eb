"""The card of a normalized data set: what the hub shows, and what a person needs to use it rightly.

Licences are those that the rows name, propagated: the whole is under the strictest of them, because a row that must be
shared alike makes the collection so. Where a row names none, or one that is not known here, the card says `other` and
lists what was found.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from .columns import SCHEMA
from .inventory import markdown_table
from .turns import TEMPLATE_VERSION

UNNAMED = "none named"

LICENCES = ("cc0-1.0", "mit", "apache-2.0", "odc-by", "cc-by", "cc-by-sa", "cc-by-nc", "cc-by-nc-sa")
"""Known licences, the least strict first; a name belongs to the last one that it begins with."""

FULL_NAMES = {
    "cc-by": "cc-by-4.0",
    "cc-by-sa": "cc-by-sa-4.0",
    "cc-by-nc": "cc-by-nc-4.0",
    "cc-by-nc-sa": "cc-by-nc-sa-4.0",
}

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


@dataclass(frozen=True, slots=True)
class Contents:
    """What a card tells. `splits` and `sources` map a name to counts, `rows` and `tokens` among them; `files` are where
    rows came from; `licences` and `drops` count rows.
    """

    splits: Mapping[str, Mapping[str, int]]
    sources: Mapping[str, Mapping[str, int]]
    files: Sequence[str]
    licences: Mapping[str, int]
    drops: Mapping[str, int]


def licences_of(rows: pa.Table) -> Counter[str]:
    """How many rows name which licence."""
    return Counter(name or UNNAMED for name in rows["source_license"].to_pylist())


def strictest(licences: Mapping[str, int]) -> str:
    """The licence of the whole, as the hub calls it; `other` where one is missing or unknown."""
    known = [_known(name) for name in licences]
    if not known or None in known:
        return "other"
    name = max((each for each in known if each is not None), key=LICENCES.index)
    return FULL_NAMES.get(name, name)


def _known(name: str) -> str | None:
    spelled = name.lower().replace("_", "-").replace(" ", "-")
    fits = [licence for licence in LICENCES if spelled.startswith(licence)]
    return fits[-1] if fits else None


def card(contents: Contents, folders: Sequence[str] = ()) -> str:
    """The card: front matter that the hub reads, then tables for people. `folders` are configurations of their own."""
    rows = sum(split["rows"] for split in contents.splits.values())
    return "\n".join([
        *_front_matter(contents, rows, folders),
        "# Conversations in Harmony",
        "",
        (
            f"{rows:,} rows, {sum(split['tokens'] for split in contents.splits.values()):,} tokens of Harmony text "
            f"(template version {TEMPLATE_VERSION}). Every text parses with a strict grammar."
        ),
        "",
        *markdown_table(("split", "rows", "tokens"), [(name, each["rows"], each["tokens"]) for name, each in contents.splits.items()]),
        *markdown_table(("data set", "rows", "tokens"), [(name, each["rows"], each["tokens"]) for name, each in contents.sources.items()]),
        *markdown_table(("licence of rows", "rows"), sorted(contents.licences.items())),
        *markdown_table(("left out because", "rows"), sorted(contents.drops.items())),
        "Made from:",
        "",
        *(f"* `{file}`" for file in contents.files),
        "",
        *markdown_table(("column", "type"), [(field.name, str(field.type)) for field in SCHEMA]),
    ])  # fmt: skip


def _front_matter(contents: Contents, rows: int, folders: Sequence[str]) -> list[str]:
    size = next((name for most, name in SIZES if rows < most), "n>10M")
    configs = [
        f"      - {{split: {json.dumps(_hub_split(name))}, path: {json.dumps(f'data/{name}/*.parquet')}}}"
        for name in contents.splits
    ]
    more = [
        f"  - {{config_name: {json.dumps(folder.replace('/', '-'))}, data_files: {json.dumps(f'{folder}/*.parquet')}}}"
        for folder in folders
    ]
    return [
        "---", "language: [en]", f"license: {strictest(contents.licences)}", f"size_categories: [{json.dumps(size)}]",
        "tags: [harmony, text]", "configs:", "  - config_name: default", "    data_files:", *configs, *more, "---", "",
    ]  # fmt: skip


def _hub_split(name: str) -> str:
    """A split as the hub allows it: words of letters, digits and underscores, and dots."""
    return "".join(each if each.isalnum() or each in "._" else "_" for each in name)
