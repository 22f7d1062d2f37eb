"""Cards of a published preparation, in the forms that others read.

    README.md              a data set card as the Hugging Face hub reads it
    croissant.json         Croissant 1.1 (JSON-LD): files, columns, licence, and what the data were derived from
    training-summary.md    the public summary of training content that the template of the European Commission asks for

Every figure comes from the manifest and the published files, and `verify` makes the cards again and compares. What only the
publisher of the data or the provider of a model knows is left blank, and says so. A local source is named without its folder.
A kind that publishes its own README.md (Harmony) keeps it.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.shards.kinds import KINDS
from tokenmill.tasks.shards.manifest import entry_files
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import filesystem, is_local, join
from xxhash import xxh3_128_hexdigest

from .measured import File, Run, data_set, in_order, lines_of, run_in, sources_of

CARD, CROISSANT, SUMMARY = "README.md", "croissant.json", "training-summary.md"

BLANK = "_to be completed by the provider_"
NOT_STATED = "not stated"

SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
         (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T"))  # fmt: skip
"""The hub's classes of size, each with the number of rows below which it applies."""

TOKEN_RANGES = ((10**9, "Less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
MORE_TOKENS = "More than 10 trillion tokens"

HUB = "hf://"

DATE = re.compile(rb'"datePublished": "[^"]*"')
"""The only part of a card that differs between equal preparations."""

CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "prov": "http://www.w3.org/ns/prov#",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}

FORMATS = {"bin": "application/octet-stream", "idx": "application/octet-stream", "parquet": "application/x-parquet",
           "jsonl": "application/jsonlines", "jsonl.gz": "application/gzip", "jsonl.zst": "application/zstd"}  # fmt: skip


def licence_rows(manifest: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The documents of each licence: of rows that name one (Harmony), otherwise of data sets, from the blend."""
    if "licences" in manifest:
        return sorted(manifest["licences"].items())
    found: Counter[str] = Counter()
    sources = sources_of(manifest)
    for name, counts in manifest["totals"]["datasets"].items():
        found[sources[data_set(*name.split("/", 1))].get("license", NOT_STATED)] += counts["documents"]
    return sorted(found.items())


def origins(manifest: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What the data were made from: name, place, licence, and a digest of the content, of every data set."""
    contents: dict[str, list[str]] = {}
    for entry in manifest["shards"]:
        slices = [f"{each['start']}-{each['stop']}:{each['content']}" for each in entry_files(entry)]
        contents.setdefault(data_set(entry["split"], entry["dataset"]), []).extend(slices)
    return [
        (
            name,
            _public_place(source),
            source.get("license", NOT_STATED),
            f"xxh3_128:{xxh3_128_hexdigest(orjson.dumps(sorted(contents.get(name, []))))}",
        )
        for name, source in sources_of(manifest).items()
    ]


def _public_place(source: Mapping[str, Any]) -> str:
    """A place as others know it: local ones without their folders, others with their revision."""
    place = source["path"]
    if is_local(place):
        return place.rstrip("/").rpartition("/")[2]
    return f"{place}@{source['revision']}" if source.get("revision") and "@" not in place else place


def digest(run: Run) -> str:
    """A digest that identifies the published data, wherever they are: of every shard and file in the manifest."""
    keys = [entry["key"] for entry in run.manifest["shards"]]
    files = [[file["path"], file["xxh3_128"]] for file in run.manifest["files"] if file["path"] != "blend.json"]
    return xxh3_128_hexdigest(orjson.dumps([run.manifest["type"], keys, files]))


def title(run: Run) -> str:
    """A name for the data."""
    return f"{', '.join(list(sources_of(run.manifest))[:3])}: {KINDS[run.manifest['type']].command}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return ["| " + " | ".join(map(_cell, row)) + " |" for row in (columns, ["---"] * len(columns), *rows)] + [""]


def _cell(value: object) -> str:
    """Text that stays in its cell and is no markup."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split())) if text not in {BLANK, "---"} else text


def card(run: Run) -> str:
    """The data set card: front matter that the hub reads, then figures."""
    manifest, totals = run.manifest, run.manifest["totals"]
    licences = [name for name, _ in licence_rows(manifest)]
    matter: dict[str, Any] = {
        "license": licences[0] if len(licences) == 1 and licences[0] not in {NOT_STATED, "none named"} else "other",
        "size_categories": [next((name for most, name in SIZES if totals["documents"] < most), "n>1T")],
        "tags": ["tokenmill", manifest["type"]],
    }
    if files := _folders(run):
        matter["configs"] = [
            {"config_name": "default", "data_files": [{"split": split, "path": path} for split, path in files]}
        ]
    datasets = [
        (
            data_set(*name.split("/", 1)),
            counts["rows"],
            counts["documents"],
            sum(counts["dropped"].values()),
            counts["tokens"],
        )
        for name, counts in totals["datasets"].items()
    ]
    front = [f"{name}: {orjson.dumps(value).decode()}" for name, value in matter.items()]  # JSON is YAML
    lines = [
        "---", *front, "---", "", f"# {_cell(title(run))}", "",
        f"{KINDS[manifest['type']].summary} {totals['documents']:,} documents, {totals['tokens']:,} tokens, from {totals['rows']:,} rows.",
        "", "## Contents", "",
        *_table(("split", "documents", "tokens"), [(name, totals["splits"][name]["documents"], totals["splits"][name]["tokens"]) for name in in_order(totals["splits"])]),
        *_table(("data set", "rows", "documents", "dropped", "tokens"), datasets),
        *(_table(("left out because", "rows"), sorted(totals["dropped"].items())) if totals["dropped"] else []),
        "## Licences", "", *_table(("licence", "documents"), licence_rows(manifest)),
        "## Made from", "", *_table(("data set", "source", "licence", "content"), origins(manifest)),
        f"Data: `xxh3_128:{digest(run)}`. `manifest.json` lists every shard with its identity; `report.html` shows the figures.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _ending(file: File) -> str:
    return file.place.rpartition("/")[2].partition(".")[2]


def _relative(run: Run, file: File) -> str | None:
    """The folder of a published file in the output, None if it is in a store."""
    within = f"{run.publication.output_dir}/"
    return file.place.removeprefix(within).rpartition("/")[0] if file.place.startswith(within) else None


def _folders(run: Run) -> list[tuple[str, list[str]]]:
    """The globs of each split that a table of rows can be loaded from."""
    found: dict[str, dict[str, None]] = {}
    for file in run.files:
        folder = _relative(run, file)
        if folder is not None and (ending := _ending(file)):
            found.setdefault(file.split, {})[f"{folder}/*.{ending}"] = None
    return [(split, sorted(found[split])) for split in in_order(found)]


def croissant(run: Run) -> dict[str, Any]:
    """The data as Croissant 1.1. Local sources have no address, so a source's identity is the hash of its content."""
    manifest = run.manifest
    sources = [
        {
            "@type": "prov:Entity",
            "@id": f"urn:{content}",
            "prov:label": name,
            "prov:atLocation": place,
            "sc:license": licence,
        }
        for name, place, licence, content in origins(manifest)
    ]
    licences = [name for name, _ in licence_rows(manifest)]
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": re.sub(r"[^\w.-]+", "-", title(run)).strip("-"),
        "description": f"{KINDS[manifest['type']].summary} {manifest['totals']['documents']:,} documents, {manifest['totals']['tokens']:,} tokens.",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "url": f"urn:xxh3_128:{digest(run)}",
        "license": licences,
        "creator": {"@type": "sc:Organization", "name": "not stated; the publisher completes this"},
        "datePublished": time.strftime("%Y-%m-%d", time.gmtime(manifest["volatile"]["created_at"])),
        "version": "1.0.0",
        "citeAs": f"{title(run)}, xxh3_128:{digest(run)}",
        "isLiveDataset": False,
        "prov:wasDerivedFrom": sources,
        "prov:wasGeneratedBy": {"@type": "prov:Activity", "@id": f"urn:xxh3_128:{digest(run)}#preparation", "prov:label": f"tokenmill {KINDS[manifest['type']].command}"},
        "distribution": list(_file_sets(run)),
        "recordSet": list(_record_sets(run)),
    }  # fmt: skip


def _endings(run: Run) -> dict[str, File]:
    """The endings of published files, each with its first file."""
    found: dict[str, File] = {}
    for file in run.files:
        for ending in [_ending(file)] if _ending(file) else ["bin", "idx"]:
            found.setdefault(ending, file)
    return found


def _file_sets(run: Run) -> Iterator[dict[str, Any]]:
    folders = {folder for file in run.files if (folder := _relative(run, file)) is not None}
    for ending in _endings(run):
        yield {
            "@type": "cr:FileSet",
            "@id": f"{ending}-files",
            "name": f"{ending}-files",
            "description": f"The published .{ending} files.",
            "encodingFormat": FORMATS.get(ending, "application/octet-stream"),
            "includes": sorted(f"{folder}/*.{ending}" for folder in folders) or [f"*.{ending}"],
        }


def _record_sets(run: Run) -> Iterator[dict[str, Any]]:
    """The columns of Parquet files and of JSON Lines; a `.bin` has no columns."""
    for ending, file in _endings(run).items():
        fields = list(_columns(file, ending))
        if fields:
            yield {
                "@type": "cr:RecordSet",
                "@id": f"{ending}-rows",
                "name": f"{ending}-rows",
                "description": f"A row of the .{ending} files.",
                "field": [_field(name, type_, of_list, ending) for name, type_, of_list in fields],
            }


def _field(name: str, type_: str, of_list: bool, ending: str) -> dict[str, Any]:
    array = {"isArray": True, "arrayShape": "-1"} if of_list else {}
    extract = {"column": name} if ending == "parquet" else {"jsonPath": f"$.{name}"}
    return {
        "@type": "cr:Field",
        "@id": f"{ending}-rows/{name}",
        "name": name,
        "description": f"The column {name}.",
        "dataType": type_,
        **array,
        "source": {"fileSet": {"@id": f"{ending}-files"}, "extract": extract},
    }


def _columns(file: File, ending: str) -> Iterator[tuple[str, str, bool]]:
    if ending == "parquet":
        system, path = filesystem(file.place)
        with cast("BinaryIO", system.open(path, "rb")) as stream:
            schema = pq.read_schema(stream)
        for each in schema:
            of_list = pa.types.is_list(each.type)
            yield each.name, _data_type(each.type.value_type if of_list else each.type), of_list
    elif ending.startswith("jsonl"):
        row = orjson.loads(next(lines_of(file), b"{}"))
        for name, value in row.items():
            if re.fullmatch(r"\w+", name):
                yield name, JSON_TYPES.get(type(value), "sc:Text"), False


JSON_TYPES = {bool: "sc:Boolean", int: "sc:Integer", float: "sc:Float"}


def _data_type(type_: pa.DataType) -> str:
    if pa.types.is_boolean(type_):
        return "sc:Boolean"
    if pa.types.is_integer(type_):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(type_) else "sc:Text"


ABOUT_SUMMARY = f"""# Public summary of training content

After the template of the European Commission for Article 53(1)(d) of Regulation (EU) 2024/1689. It covers the data of this
preparation only; a model trained on several needs all of them. Figures are measured. Blanks are marked {BLANK}, because the
data do not tell.
"""


def training_summary(run: Run) -> str:
    """The public summary of training content, with the sections of the Commission's template."""
    lines = [
        ABOUT_SUMMARY,
        *_general(run.manifest["totals"]),
        *_listed_sources(run.manifest),
        *_processing(run.manifest["totals"]),
    ]
    return "\n".join(lines)


def _general(totals: Mapping[str, Any]) -> list[str]:
    tokens = totals["tokens"]
    size = next((name for most, name in TOKEN_RANGES if tokens < most), MORE_TOKENS) if tokens else BLANK
    measured = [
        ("Modality", "Text"),
        ("Training data size, text", size),
        ("Tokens, measured", tokens or "not tokenized"),
        ("Documents, measured", totals["documents"]),
        ("Bytes of source as stored, measured", totals["source_bytes"]),
    ]
    unknown = (
        "Types of content",
        "Latest date of data acquisition or collection",
        "Linguistic characteristics",
        "Other relevant characteristics",
    )
    return [
        "## 1. General information",
        "",
        "### 1.1 Provider identification",
        "",
        *_blanks("Provider name and contact", "Authorised representative"),
        "### 1.2 Model identification",
        "",
        *_blanks("Versioned model name", "Model dependencies", "Date of placement on the Union market"),
        "### 1.3 Modalities, overall training data size and other characteristics",
        "",
        *_table(("item", "answer"), [*measured, *((name, BLANK) for name in unknown)]),
    ]


def _blanks(*names: str) -> list[str]:
    return _table(("item", "answer"), [(name, BLANK) for name in names])


def _listed_sources(manifest: Mapping[str, Any]) -> list[str]:
    """The data sets of a public hub, and the others, whose nature only the provider knows."""
    counts = {data_set(*name.split("/", 1)): found for name, found in manifest["totals"]["datasets"].items()}
    columns = ("data set", "source", "licence", "documents", "tokens")
    rows = [
        (name, place, licence, counts[name]["documents"], counts[name]["tokens"])
        for name, place, licence, _ in origins(manifest)
        if name in counts
    ]
    public, others = (
        [row for row in rows if row[1].startswith(HUB)],
        [row for row in rows if not row[1].startswith(HUB)],
    )
    return [
        "## 2. List of data sources",
        "",
        "### 2.1 Publicly available datasets",
        "",
        *(_table(columns, public) if public else ["The blend names no data set of a public hub.", ""]),
        "### 2.2 Private non-publicly available datasets obtained from third parties",
        "",
        *_blanks("Commercially licensed by rightsholders", "Obtained from other third parties"),
        "### 2.3 Data crawled and scraped from online sources",
        "",
        *_blanks("Crawlers, purposes and behaviour", "Period of collection", "Content and domains"),
        "### 2.4 User data",
        "",
        *_blanks("User data"),
        "### 2.5 Synthetic data",
        "",
        *_blanks("Synthetic data, and the models that generated them"),
        "### 2.6 Other sources of data",
        "",
        *(
            [f"Files and object stores. Which of 2.1 to 2.5 each belongs to: {BLANK}", "", *_table(columns, others)]
            if others
            else ["None.", ""]
        ),
    ]


def _processing(totals: Mapping[str, Any]) -> list[str]:
    removed = sum(totals["dropped"].values())
    return [
        "## 3. Data processing aspects",
        "",
        "### 3.1 Respect of reservation of rights from the text and data mining exception or limitation",
        "",
        *_blanks("Measures before and during collection"),
        "### 3.2 Removal of illegal content",
        "",
        *_blanks("Measures"),
        "### 3.3 Other information",
        "",
        f"{totals['rows']:,} rows were read, {totals['documents']:,} documents were kept, and {removed:,} rows were removed.",
        "",
        *_table(("removed because", "rows"), sorted(totals["dropped"].items()) or [("nothing was removed", 0)]),
    ]


def cards(run: Run) -> dict[str, bytes]:
    """The cards by their names in the output folder, without those that the kind publishes itself."""
    made = {
        CARD: card(run).encode(),
        CROISSANT: orjson.dumps(croissant(run), option=orjson.OPT_INDENT_2),
        SUMMARY: training_summary(run).encode(),
    }
    own = {file["path"] for file in run.manifest["files"]}
    return {name: content for name, content in made.items() if name not in own}


def publish_cards(output_dir: str) -> list[str]:
    """Write the cards of a published preparation to its folder, and return their places; errors as in `publish`."""
    run = run_in(output_dir)
    return [publish_bytes(join(run.publication.output_dir, name), content).path for name, content in cards(run).items()]


def card_problems(output_dir: str) -> list[str]:
    """The written cards that differ from what the published files say."""
    run = run_in(output_dir)
    places = {join(run.publication.output_dir, name): content for name, content in cards(run).items()}
    return [
        f"{place}: does not agree with the published files; write it again: tokenmill report {output_dir}"
        for place, content in places.items()
        if (found := read_bytes(place)) is not None and DATE.sub(b"", found) != DATE.sub(b"", content)
    ]
