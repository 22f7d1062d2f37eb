"""Cards of a published preparation, in the forms that others read.

    README.md              a dataset card as the Hugging Face hub reads it
    croissant.json         Croissant 1.1 (JSON-LD): files, columns, license, and the sources of the data
    training-summary.md    on request: the public summary of training content that the European Commission's template asks for

Every number is computed from the manifest and the published files, and `verify` makes the cards again and compares. Facts that only the
publisher of the data or the provider of a model knows are left blank, and marked so. A local source is named without its folder.
Croissant names the sources of sources too, as far as their
preparations are still here; `verify` does not need those.

The summary has the headings and items of the form in the Commission's Explanatory Notice and Template for the Public Summary of
Training Content for general-purpose AI models (24 July 2025; adopted as C(2025) 8311, 5 December 2025):
https://digital-strategy.ec.europa.eu/en/library/explanatory-notice-and-template-public-summary-training-content-general-purpose-ai-models
They were checked against the common parts of the published summaries of Apertus, Bielik v3 and Gemini 3. Optional comments, and
modalities other than text, are omitted.
"""

import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.dataset.dataset import Part, dataset_name, in_order
from tokenmill.tasks.kit import html
from tokenmill.tasks.kit.parts import Table, counted
from tokenmill.tasks.shards.kinds import KINDS
from tokenmill.tasks.shards.manifest import BLENDS, derived_entries, entry_files, join_published, read_manifest
from tokenmill.tasks.shards.publication import QUARANTINE
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import read_bytes, size_of
from tokenmill.tasks.storage import is_local, join, open_binary
from xxhash import xxh3_128_hexdigest

from .measured import Measured, lines_of, measured, sources_of
from .registry import DEEPEST, publisher
from .summary import amount

CARD, CROISSANT, SUMMARY = "README.md", "croissant.json", "training-summary.md"
NOT_STATED = "not stated"

# The hub's classes of size, each with the number of rows below which it applies
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
         (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T"))  # fmt: skip

TOKEN_RANGES = ((10**9, "Less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
MORE_TOKENS = "More than 10 trillion tokens"
MEASURED = (("Documents", "documents"), ("Tokens", "tokens"), ("Bytes of source as stored", "source_bytes"))
HUB = "hf://"

# Known licenses, the least strict first; a name belongs to the last one that is a prefix of it
LICENCES = ("cc0-1.0", "mit", "apache-2.0", "odc-by", "cc-by", "cc-by-sa", "cc-by-nc", "cc-by-nc-sa")

FULL_NAMES = {name: f"{name}-4.0" for name in LICENCES[4:]}

CROISSANT_TERMS = (
    "arrayShape citeAs column containedIn equivalentProperty extract field fileObject fileProperty fileSet format includes isArray "
    "isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace samplingRate separator source "
    "subField transform"
)

JSON_TYPES = {bool: "sc:Boolean", int: "sc:Integer", float: "sc:Float"}

CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in CROISSANT_TERMS.split()},
}

FORMATS = {"bin": "application/octet-stream", "idx": "application/octet-stream", "parquet": "application/x-parquet",
           "jsonl": "application/jsonlines", "jsonl.gz": "application/gzip", "jsonl.zst": "application/zstd"}  # fmt: skip


def licence_rows(manifest: Manifest) -> list[tuple[str, int]]:
    """Return the documents of each license: of rows that name one (Harmony), otherwise of datasets, from the blend."""
    return sorted(manifest["licences"].items()) if "licences" in manifest else stated_rows(manifest, "license")


def strictest(licences: Collection[str]) -> str:
    """Return the license of the whole by its name on the Hub: the strictest one, because one share-alike row makes all rows
    share-alike. `other` if one of several is unknown, or if one is missing.
    """
    spelled = [name.lower().replace("_", "-").replace(" ", "-") for name in licences]
    known = [[each for each in LICENCES if name.startswith(each)] for name in spelled]  # the longest one is the last
    if known and all(known):
        name = max((fits[-1] for fits in known), key=LICENCES.index)
        return FULL_NAMES.get(name, name)
    return next(iter(licences)) if len(licences) == 1 and not {NOT_STATED, "none named"} & {*licences} else "other"


def stated_rows(manifest: Manifest, field: str) -> list[tuple[str, int]]:
    """Count documents by a field of their dataset in the blend; several values count as one."""
    found: Counter[str] = Counter()
    sources = sources_of(manifest)
    for name, counts in manifest["totals"]["datasets"].items():
        stated = sources[dataset_name(*name.split("/", 1))].get(field, NOT_STATED)
        found[stated if isinstance(stated, str) else ", ".join(stated)] += counts["documents"]
    return sorted(found.items())


def languages(manifest: Manifest) -> list[str]:
    """Return the languages that the blend states, in its order."""
    return list(dict.fromkeys(each for source in sources_of(manifest).values() for each in source.get("languages", [])))


def origins(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Return the sources of the data: name, place, license, and a digest of the content, of every dataset."""
    contents: dict[str, list[str]] = {}
    for entry in manifest["shards"]:
        slices = [f"{each['start']}-{each['stop']}:{each['content']}" for each in entry_files(entry)]
        contents.setdefault(dataset_name(entry["split"], entry["dataset"]), []).extend(slices)
    found: list[tuple[str, str, str, str]] = []
    for name, source in sources_of(manifest).items():
        place, revision = source["path"], source.get("revision")
        if is_local(place):  # others don't know the folders of this machine
            place = place.rstrip("/").rpartition("/")[2]
        elif revision and "@" not in place:
            place = f"{place}@{revision}"
        content = f"xxh3_128:{xxh3_128_hexdigest(orjson.dumps(sorted(contents.get(name, []))))}"
        found.append((name, place, source.get("license", NOT_STATED), content))
    return found


def digest(run: Measured) -> str:
    """Return a digest that identifies the published data, independent of their location: of every shard and file without local paths."""
    # Blends and quarantined rows name places, which differ where the data don't
    keys = [entry["key"] for entry in run.manifest["shards"]]
    named = [(file["path"], file["xxh3_128"]) for file in run.manifest["files"]]
    files = [each for each in named if each[0].partition("/")[0] not in {*BLENDS, QUARANTINE}]
    return xxh3_128_hexdigest(orjson.dumps([run.manifest["type"], keys, files]))


def title(run: Measured) -> str:
    """Return a name for the data."""
    names = list(sources_of(run.manifest))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 - as many as a title holds
    return f"{', '.join(names[:3])}{more} ({KINDS[run.manifest['type']].command})"


def card(run: Measured) -> str:
    """Return the dataset card: front matter that the hub reads, then figures."""
    manifest, totals = run.manifest, run.manifest["totals"]
    matter: dict[str, Any] = {
        "license": strictest([name for name, _ in licence_rows(manifest)]),
        "size_categories": [next((name for most, name in SIZES if totals["documents"] < most), "n>1T")],
        "tags": ["tokenmill", manifest["type"]],
    }
    if spoken := languages(manifest):
        matter["language"] = spoken
    if configs := _configs(run):
        matter["configs"] = configs
    datasets = [
        (
            dataset_name(*name.split("/", 1)), each["rows"], each["documents"], sum(each["dropped"].values()), each["tokens"],
        )
        for name, each in totals["datasets"].items()
    ]  # fmt: skip
    splits = [
        (name, totals["splits"][name]["documents"], totals["splits"][name]["tokens"])
        for name in in_order(totals["splits"])
    ]
    sizes = ("documents", "tokens") if totals["tokens"] else ("documents",)
    width = 3 + len(sizes)
    return html.document(
        "card.md.jinja", matter=matter, title=title(run), digest=digest(run),
        about=f"{description(run)} Made from {counted(totals['rows'], 'row')} of {counted(len(datasets), 'dataset')}.",
        splits=Table("Splits", ("split", *sizes), [row[: 1 + len(sizes)] for row in splits]),
        datasets=Table("Datasets", ("dataset", "rows", "documents", "dropped", "tokens")[:width], [row[:width] for row in datasets]),
        dropped=Table("Rows dropped", ("omitted because", "rows"), sorted(totals["dropped"].items())),
        licenses=Table("Licenses", ("license", "documents"), licence_rows(manifest)),
        sources=Table("Made from", ("dataset", "source", "license", "content"), origins(manifest)),
    )  # fmt: skip


def description(run: Measured) -> str:
    """Describe the data: their form, size and languages."""
    spoken = languages(run.manifest)
    named = f", in {', '.join(spoken)}" if spoken else ""
    return f"{KINDS[run.manifest['type']].contents}: {amount(run.manifest['totals'])}{named}."


def _ending(file: Part) -> str:
    return file.place.rpartition("/")[2].partition(".")[2]


def _relative(run: Measured, file: Part) -> str | None:
    """The folder of a published file in the output, None if it is in a store."""
    within = f"{run.path}/"
    return file.place.removeprefix(within).rpartition("/")[0] if file.place.startswith(within) else None


def _configs(run: Measured) -> list[dict[str, Any]]:
    """How the Hub loads the data as tables: its splits, and each derived folder, such as one of Harmony's pools."""
    found: dict[str, dict[str, None]] = {}
    for file in run.files_of_rows:
        folder = _relative(run, file)
        if folder is not None and (ending := _ending(file)):
            # Harmony keeps the splits of its sources
            split = folder.rpartition("/")[2] if run.type == "harmony" else file.split
            found.setdefault(split, {})[f"{folder}/*.{ending}"] = None
    if not found:
        return []
    # The Hub allows letters, digits, dots and underscores in the name of a split
    files = [{"split": re.sub(r"[^\w.]", "_", split), "path": sorted(found[split])} for split in in_order(found)]
    derived = derived_entries(run.manifest)
    names = (join_published(run.path, each) for entry in derived for of in entry["published"].values() for each in of)
    folders = dict.fromkeys(name.removeprefix(f"{run.path}/").rpartition("/")[0] for name in names)
    pools = [{"config_name": each.replace("/", "-"), "data_files": f"{each}/*.parquet"} for each in folders]
    return [{"config_name": "default", "data_files": files}, *pools]


def croissant(run: Measured) -> dict[str, Any]:
    """Return the data as Croissant 1.1. Local sources lack an address, so a source's identity is the hash of its content."""
    manifest = run.manifest
    licences = [name for name, _ in licence_rows(manifest)]
    folders = {folder for file in run.files_of_rows if (folder := _relative(run, file)) is not None}
    file_sets = [
        {
            "@type": "cr:FileSet", "@id": f"{ending}-files", "name": f"{ending}-files",
            "description": f"The published .{ending} files.",
            "encodingFormat": FORMATS.get(ending, "application/octet-stream"),
            "includes": sorted(f"{folder}/*.{ending}" for folder in folders) or [f"*.{ending}"],
        }
        for ending in _endings(run)
    ]  # fmt: skip
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": re.sub(r"[^\w.-]+", "-", title(run)).strip("-"),
        "description": description(run),
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "url": f"urn:xxh3_128:{digest(run)}",
        "license": licences,
        **({"inLanguage": spoken} if (spoken := languages(manifest)) else {}),
        "creator": {"@type": "sc:Organization", "name": "not stated; the publisher completes this"},
        "datePublished": time.strftime("%Y-%m-%d", time.gmtime(manifest["volatile"]["created_at"])),
        "version": "1.0.0",
        "citeAs": f"{title(run)}, xxh3_128:{digest(run)}",
        "isLiveDataset": False,
        "prov:wasDerivedFrom": _entities(manifest, DEEPEST),
        "prov:wasGeneratedBy": {"@type": "prov:Activity", "@id": f"urn:xxh3_128:{digest(run)}#preparation", "prov:label": f"tokenmill {KINDS[manifest['type']].command}"},
        "distribution": file_sets,
        "recordSet": list(_record_sets(run)),
    }  # fmt: skip


def _entities(manifest: Manifest, deeper: int) -> list[dict[str, Any]]:
    """Return the provenance tree of a dataset."""
    found: list[dict[str, Any]] = []
    sources = sources_of(manifest)
    for name, place, licence, content in origins(manifest):
        folder = publisher(sources[name]["path"]) if deeper else None
        above = read_manifest(folder) if folder else None
        entity = {
            "@type": "prov:Entity", "@id": f"urn:{content}", "prov:label": name, "prov:atLocation": place,
            "sc:license": licence,
        }  # fmt: skip
        found.append({**entity, "prov:wasDerivedFrom": _entities(above, deeper - 1)} if above else entity)
    return found


def _endings(run: Measured) -> dict[str, Part]:
    """The endings of published files, each with its first file."""
    found: dict[str, Part] = {}
    for file in run.files_of_rows:
        for ending in [_ending(file)] if _ending(file) else ["bin", "idx"]:  # a pair is named without an ending
            found.setdefault(ending, file)
    return found


def _record_sets(run: Measured) -> Iterator[dict[str, Any]]:
    """Return the columns of Parquet files and of JSON Lines; a `.bin` doesn't have columns."""
    for ending, file in _endings(run).items():
        fields: list[dict[str, Any]] = []
        for name, type_, of_list in _columns(file, ending):
            array = {"isArray": True, "arrayShape": "-1"} if of_list else {}  # -1: of any length
            extract = {"column": name} if ending == "parquet" else {"jsonPath": f"$.{name}"}
            fields.append({
                "@type": "cr:Field", "@id": f"{ending}-rows/{name}", "name": name, "description": f"The column {name}.",
                "dataType": type_, **array, "source": {"fileSet": {"@id": f"{ending}-files"}, "extract": extract},
            })  # fmt: skip
        if fields:
            yield {
                "@type": "cr:RecordSet", "@id": f"{ending}-rows", "name": f"{ending}-rows",
                "description": f"A row of the .{ending} files.", "field": fields,
            }  # fmt: skip


def _columns(file: Part, ending: str) -> Iterator[tuple[str, str, bool]]:
    if ending == "parquet":
        with open_binary(file.place) as stream:
            schema = pq.read_schema(stream)
        for each in schema:
            of_list = pa.types.is_list(each.type)
            stored = each.type.value_type if of_list else each.type
            kinds = {"Boolean": pa.types.is_boolean, "Integer": pa.types.is_integer, "Float": pa.types.is_floating}
            yield each.name, next((f"sc:{kind}" for kind, fits in kinds.items() if fits(stored)), "sc:Text"), of_list
    elif ending.startswith("jsonl"):
        row = orjson.loads(next(lines_of(file), b"{}"))  # the columns of the first row: rows of RL have the same ones
        for name, value in row.items():
            if re.fullmatch(r"\w+", name):
                yield name, JSON_TYPES.get(type(value), "sc:Text"), False


def training_summary(run: Measured) -> str:
    """Return the public summary of training content: the Commission's form, answered from the data, and measured tables."""
    manifest = run.manifest
    totals = manifest["totals"]
    kept, removed = totals["documents"], sum(totals["dropped"].values())
    found: dict[tuple[str, str], object] = {
        ("1.3.", "Modality"): "Text",
        ("3.3.", "Other relevant information about data processing (optional)"): (
            f"{totals['rows']:,} rows were read, {kept:,} documents were kept, and {removed:,} rows were removed, as below."
        ),
    }
    if tokens := totals["tokens"]:
        size = next((name for most, name in TOKEN_RANGES if tokens < most), MORE_TOKENS)
        found["1.3.", "Training data size"] = size
    if languages(manifest):
        stated = "; ".join(f"{name}: {count:,} documents" for name, count in stated_rows(manifest, "languages"))
        found["1.3.", "Description of the linguistic characteristics of the overall training data"] = stated
    if any(place.startswith(HUB) for _, place, _, _ in origins(manifest)):
        found["2.1.", "Have you used publicly available datasets to train the model?"] = "Yes"
        found["2.1.", "If yes, specify the modality(ies) of the content covered by the datasets concerned"] = "Text"
    return html.document("training-summary.md.jinja", answers=found, tables=_measured_tables(manifest))


def _measured_tables(manifest: Manifest) -> dict[str, Table]:
    """Return tables with numbers, by their section: sizes, datasets on a public hub and others, removed rows."""
    totals = manifest["totals"]
    counts = {dataset_name(*name.split("/", 1)): found for name, found in totals["datasets"].items()}
    columns = ("dataset", "source", "license", "documents", "tokens")
    rows = [
        (name, place, license_, counts[name]["documents"], counts[name]["tokens"])
        for name, place, license_, _ in origins(manifest)
        if name in counts
    ]
    dropped = sorted(totals["dropped"].items()) or [("nothing was removed", 0)]
    return {
        "1.3.": Table("Sizes", ("measured", "count"), [(what, totals[field]) for what, field in MEASURED]),
        "2.1.": Table("Public datasets", columns, [row for row in rows if row[1].startswith(HUB)]),
        "2.6.": Table("Other datasets", columns, [row for row in rows if not row[1].startswith(HUB)]),
        "3.3.": Table("Removed", ("removed because", "rows"), dropped),
    }


def cards(run: Measured, *, summary: bool = False) -> dict[str, bytes]:
    """Return the cards by their names in the output folder, without those that the kind publishes itself.

    They include the EU's summary if it's asked for or already there.
    """
    made = {CARD: card(run).encode(), CROISSANT: orjson.dumps(croissant(run), option=orjson.OPT_INDENT_2)}
    if summary or size_of(join(run.path, SUMMARY)) is not None:
        made[SUMMARY] = training_summary(run).encode()
    own = {file["path"] for file in run.manifest["files"]}  # the Harmony of earlier versions published a card
    return {name: content for name, content in made.items() if name not in own}


def publish_cards(run: Measured, *, summary: bool = False) -> list[str]:
    """Write the cards of a published preparation to its folder, and return their places; errors as in `publish`."""
    return [publish_bytes(join(run.path, name), content).path for name, content in cards(run, summary=summary).items()]


def card_problems(output_dir: str) -> list[str]:
    """Return the written cards that differ from the published files."""
    run = measured(output_dir)
    places = {join(run.path, name): content for name, content in cards(run).items()}
    return [
        f"{place}: does not agree with the published files; write it again: tokenmill report {output_dir}"
        for place, content in places.items()
        if (found := read_bytes(place)) is not None and _lasting(found) != _lasting(content)
    ]


def _lasting(content: bytes) -> object:
    # Dates differ from run to run, and the sources of sources may be gone
    try:
        told = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content
    sources = told.get("prov:wasDerivedFrom", []) if isinstance(told, dict) else []
    return {
        **told,
        "datePublished": None,
        "prov:wasDerivedFrom": [{**each, "prov:wasDerivedFrom": None} for each in sources],
    }
