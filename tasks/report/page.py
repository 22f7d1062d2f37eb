"""The page of a run: one static HTML file, derived from its manifest, receipts and published files.

It leads with warnings, then shows samples, then numbers. A section is a row of `SECTIONS`: its title, its requirements, and the
function that makes its tables and charts. A kind has the sections whose needs it meets, so a new kind has a page. Every section
but the last is the same for the same data, at any place and time; `verify` makes them again and compares. The
last one, `This run`, has times. The tiny blend's page takes 0.3 s and 25 kB.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
from tokenmill.tasks.dataset.dataset import dataset_name, in_order
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit import html
from tokenmill.tasks.kit.charts import bars, columns, flow
from tokenmill.tasks.kit.parts import Block, Cell, Code, Excerpt, Items, Table, Text, counted, share
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.shards.manifest import THREADS
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, join

from .cards import NOT_STATED, card_problems, digest, licence_rows, publish_cards, stated_rows
from .measured import ROW, Measured, drops_by_file, measured, sources_of
from .summary import PAGE, amount, follows_weights, not_read, warnings

MOST_FILES = 10  # files and shards in the tables of the worst
MOST_CODE = 20_000  # characters of settings and blend that a page quotes


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page: `needs` are ways of storing documents (see `Dataset.format`), any if empty."""

    title: str
    needs: frozenset[str]
    parts: Callable[[Measured], Sequence[Block]]


NOT_SHOWN = "Not shown: "  # how a section begins whose figures can't be computed here


def to_act_on(run: Measured) -> list[Block]:
    """What to read before training on the data."""
    found = [*warnings(run.manifest), *not_read(run.manifest)]
    if bad := run.manifest["totals"]["quarantined"]:
        found.append(
            f"{counted(bad, 'row')} could not be used; read quarantine/*.jsonl for file, line and reason, and fix the source"
        )
    return [Items(found)] if found else [Text("Nothing: every file and field was read, and no warning applies.")]


def overview(run: Measured) -> list[Block]:
    """Show inputs and outputs."""
    totals = run.manifest["totals"]
    dropped, datasets = sum(totals["dropped"].values()), counted(len(totals["datasets"]), "dataset")
    found: list[Block] = [
        Text(f"{counted(totals['rows'], 'row')} of {datasets} became {amount(totals)}; {dropped:,} were dropped.")
    ]
    if run.fates:
        found.append(flow("From datasets to splits and drops, in rows", run.fates, totals["dropped"]))
    tokens = ["tokens"] if totals["tokens"] else []
    fields = ("rows", "documents", "dropped", *tokens, "source_bytes")
    rows = [
        (dataset_name(*name.split("/", 1)), *(sum(each[of].values()) if of == "dropped" else each[of] for of in fields))
        for name, each in totals["datasets"].items()
    ]
    found.append(Table("Datasets; bytes of source as stored", ("dataset", *fields[:-1], "bytes"), rows))
    splits = [
        (name, *(totals["splits"][name][each] for each in ("documents", *tokens)))
        for name in in_order(totals["splits"])
    ]
    found.append(Table("Splits", ("split", "documents", *tokens), splits))
    if totals["dropped"]:
        found.append(Table("Rows dropped", ("reason", "rows"), sorted(totals["dropped"].items())))
    if lines := preparation(run.manifest["type"]).summary(run.manifest):
        found.append(Items(lines))
    return found


def planned_and_realised(run: Measured) -> list[Block]:
    """Show the weights of the blend, and the published share of each dataset, by split."""
    unit, applied = "tokens" if run.manifest["totals"]["tokens"] else "documents", follows_weights(run.manifest)
    sampled, sources = run.manifest.get("sampling", {}).get("splits", {}), sources_of(run.manifest)
    found: list[Block] = []
    for split in in_order({end for _, end in run.tokens}):
        counts = {name: count for (name, end), count in run.tokens.items() if end == split}
        # If sampling or batches omit or repeat data, what is read counts
        read = {name: each["tokens"] for name, each in sampled.get(split, {}).items()}
        if split == "train" and "batches" in run.manifest:
            read = {name: each["read"] for name, each in run.manifest["batches"]["datasets"].items()}
        counts |= {name: count for name, count in read.items() if name in counts}
        if len(counts) < 2:  # noqa: PLR2004 - one dataset is all of it, whatever its weight
            continue
        # With a budget, training reads as much of a dataset as its phases draw, not what the weights ask for
        phases = run.manifest.get("phases", []) if split == "train" else []
        weights = {
            name: sum(phase["drawn"].get(name, 0.0) for phase in phases) if phases else sources[name]["weight"]
            for name in counts
        }
        wanted, stored = sum(weights.values()), sum(counts.values())
        names = sorted(counts, key=lambda name: (-weights[name], name))
        caption = f"Shares of {split}"
        if wanted:
            pairs = {name: (weights[name] / wanted, counts[name] / stored) for name in names}
            found.append(bars(caption, pairs, ("target share", f"share of {unit}"), lambda each: f"{each:.1%}"))
        rows: list[tuple[Cell, ...]] = []
        for name, weight, count in ((name, weights[name], counts[name]) for name in names):
            epochs = f"{(weight / wanted) / (count / stored):.2f}" if wanted and count else "-"
            rows.append((name, share(weight, wanted), share(count, stored), round(count), epochs))
        heads = ("dataset", "target share", f"share of {unit}", unit, "epochs")[: 5 if applied else 4]
        found.append(Table(caption, heads, [row[: len(heads)] for row in rows]))
    about = (
        f"Epochs: how often training reads a dataset if it reads as many {unit} as the split has, by the weights."
        if applied
        else "The weights don't change this output: all of it is published once."
    )
    return [*found, Text(about)] if found else []


def phases_of_training(run: Measured) -> list[Block]:
    """Show the tokens that the budget reads in each phase, and the tokens in the phase's files."""
    phases = [phase for phase in run.manifest.get("phases", []) if "pairs" in phase]
    held: Counter[str] = Counter()
    for (name, split), count in run.tokens.items():
        held[name] += count if split == "train" else 0
    rows: list[tuple[Cell, ...]] = []
    found: list[Block] = []
    for phase in phases:
        given: Counter[str] = Counter()
        for pair in phase["pairs"]:
            given[pair["dataset"]] += pair["drawn"]
        # Files hold whole documents, so a phase has a bit more or less of a dataset than its budget
        planned, there = sum(phase["drawn"].values()), sum(given.values())
        pairs = {name: (tokens / planned, given[name] / there) for name, tokens in phase["drawn"].items()}
        if len(pairs) > 1:
            found.append(bars(f"Phase {phase['name']}", pairs, ("planned", "published"), lambda each: f"{each:.1%}"))
        for name, tokens in phase["drawn"].items():
            shares = share(tokens, planned), share(given[name], there)
            rows.append((phase["name"], name, *shares, round(given[name]), f"{given[name] / held[name]:.2f}"))
    if rows:
        found.append(Table("Phases", ("phase", "dataset", "planned", "published", "tokens", "epochs"), rows))
    return found


QUANTILES = (0, 0.5, 0.99, 1)


def document_lengths(run: Measured) -> list[Block]:
    """Return how long documents are: between powers of two, and quantiles by dataset and split."""
    if not run.lengths:
        return []
    unit = "bytes" if run.format == "lines" else "tokens"
    everything = np.concatenate([each.lengths for each in run.lengths])
    measured, all_documents = len(everything), sum(each.documents for each in run.lengths)
    note = "" if measured >= all_documents else f"; the first {measured:,} of {all_documents:,} were measured"
    what = "Sequences" if run.format == "packs" else "Documents"
    powers = np.frexp(everything.astype(np.float64))[1] - 1  # -1 of an empty document
    first = int(powers.min())
    counts = np.bincount(powers - first).tolist()
    units = ("", "Ki", "Mi", "Gi")
    labels = [
        "0" if power < 0 else f"{1 << power % 10}{units[power // 10]}" for power in range(first, first + len(counts))
    ]
    rows = [
        (
            f"{each.dataset}, {each.split}", len(each.lengths),
            *(int(np.quantile(each.lengths, at, method="lower")) for at in QUANTILES), f"{each.lengths.mean():,.1f}",
        )
        for each in run.lengths
    ]  # fmt: skip
    heads = ("documents of", "measured", "shortest", "median", "99 %", "longest", "mean")
    return [
        columns(f"{what} by length in {unit}", counts, labels, what.lower()),
        Table(f"Lengths in {unit}{note}", heads, rows),
    ]


def density(run: Measured) -> list[Block]:
    """Return how many tokens the vocabulary needs for the text of each dataset."""
    measured = [(each, each.tokens / each.size) for each in run.densities if each.size]
    if not measured:
        return []
    rows = [(each.dataset, each.documents, each.tokens, each.size, f"{ratio:.3f}") for each, ratio in measured]
    values = {each.dataset: (ratio,) for each, ratio in measured}
    caption = "Tokens per byte of UTF-8 text, in the first documents of each dataset"
    return [
        bars("Tokens per byte", values, ("tokens per byte",), lambda each: f"{each:.3f}"),
        Table(caption, ("dataset", "documents", "tokens", "bytes", "ratio"), rows),
    ]


def packing(run: Measured) -> list[Block]:
    """Return how full packs are."""
    size = run.manifest["settings"]["pack_size"]
    found: list[Block] = []
    rows: list[tuple[Cell, ...]] = []
    for each in run.packed:
        tenths = np.bincount(np.minimum(each.lengths * 10 // size, 9), minlength=10).tolist()
        found.append(columns(f"Packs by fill, {each.split}", tenths, [f"{at * 10}%" for at in range(10)], "packs"))
        tokens = int(each.lengths.sum())
        rows.append((each.split, each.packs, tokens, share(tokens, each.packs * size)))
    caption = f"The first packs of each file, of {size:,} tokens"
    return [*found, Table(caption, ("split", "packs", "tokens", "fill"), rows)]


def masks(run: Measured) -> list[Block]:
    """Which roles the loss trains on."""
    found: list[Block] = []
    for each in run.packed:
        caption = f"Tokens by role in the first packs, {each.split}"
        total, learned = (sum(counts[at] for counts in each.by_role.values()) for at in (0, 1))
        values = {role: (stored / total, trained / total) for role, (stored, trained) in each.by_role.items()}
        counts = {**each.by_role, "all": (total, learned)}
        rows = [(role, stored, trained, share(trained, stored)) for role, (stored, trained) in counts.items()]
        found.append(bars(caption, values, ("stored", "trained on"), lambda each: f"{each:.1%}"))
        found.append(Table(caption, ("role", "tokens", "trained on", "share"), rows))
    return found


def contents(run: Measured) -> list[Block]:
    """Show stated facts of blend and rows: licenses, languages, domains; and pools. It doesn't guess."""
    found: list[Block] = [Table("Licenses", ("license", "documents"), licence_rows(run.manifest))]
    for field in ("languages", "domain"):
        rows = stated_rows(run.manifest, field)
        if rows != [(NOT_STATED, run.manifest["totals"]["documents"])]:
            found.append(Table(f"{field.capitalize()}, as the blend states", (field, "documents"), rows))
    for name, counts in run.named.items():
        rows = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[: html.MAX_ROWS]
        found.append(
            Table(f"{name}: the most frequent of {len(counts):,} values, as the rows state", (name, "rows"), rows)
        )
    pools = run.manifest.get("selection", {}).get("pools", {})
    counted = [(name, pool["rows"], pool["tokens"]) for name, pool in pools.items() if pool["rows"]]
    if counted:
        found.append(Table("Pools; a row may be in several", ("pool", "rows", "tokens"), counted))
    if empty := [name for name, pool in pools.items() if not pool["rows"]]:
        found.append(Text(f"Pools without rows: {', '.join(empty)}."))
    return [part for part in found if not isinstance(part, Table) or part.rows]


def worst_files(run: Measured) -> list[Block]:
    """Return the source files with the most dropped rows."""
    rows: list[tuple[Cell, ...]] = []
    for name, counts in drops_by_file(run.manifest).items():
        drops = {reason: count for reason, count in counts.items() if reason not in {"rows", "quarantined"} and count}
        reasons = sorted(drops.items(), key=lambda each: (-each[1], each[0]))
        listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
        if drops:
            rows.append((_short_place(name), counts["rows"], counts["quarantined"], sum(drops.values()), listed))
    # Bad rows can be repaired in the source, so they come first
    rows.sort(key=lambda row: (-int(row[2]), -int(row[3]), str(row[0])))
    heads = ("file", "rows", "bad", "dropped", "reasons")
    return [Table("Files with the most bad and dropped rows", heads, rows[:MOST_FILES])] if rows else []


def _short_place(place: str) -> str:
    return "/".join(place.split("/")[-2:]) if place.startswith("/") else place


def samples(run: Measured) -> list[Block]:
    """Return the beginnings of documents, decoded; rows without a text as JSON."""
    about = {"packs": "Text that is trained on has a colored background.", "documents": "All text is trained on."}
    introduction = Text(f"The beginning of the first document of each dataset and split. {about.get(run.format, '')}")
    laid_out = run.format in {"lines", "parquet"}
    excerpts = (
        Excerpt(
            f"{each.dataset}, {each.split}", [(part.role, part.trained, part.text) for part in each.passages],
            laid_out and each.passages[0].role == ROW,
        )
        for each in run.samples if each.passages
    )  # fmt: skip
    return [introduction, *excerpts]


def identity(run: Measured) -> list[Block]:
    """What decides the bytes, and the command that makes them again."""
    manifest = run.manifest
    rows: list[tuple[Cell, Cell]] = [
        *(
            (name, manifest[name].get("fingerprint") or manifest[name].get("digest") or "-")
            for name in ("tokenizer", "template")
            if name in manifest
        ),
        ("data", f"xxh3_128:{digest(run)}"),
    ]
    blend = orjson.dumps(manifest["blend"], option=orjson.OPT_INDENT_2).decode()[:MOST_CODE]
    settings = orjson.dumps(_chosen(manifest["settings"]), option=orjson.OPT_INDENT_2).decode()[:MOST_CODE]
    return [
        Text("Save the blend below as blend.json; this command makes the same bytes from the same sources:"),
        Code(command(manifest)),
        Code(blend, "blend.json"),
        Code(settings, "Settings that can change the data"),
        Table("Digests of inputs and data", ("what", "digest"), rows),
    ]


def _chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that are off."""
    inner = {name: _chosen(value) if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: value for name, value in inner.items() if value not in (None, [], {})}


def command(manifest: Manifest) -> str:
    """Return the command that prepares the same data."""
    kind = preparation(manifest["type"])
    chosen = _flat(manifest["settings"])
    usual = _flat(kind.settings.model_construct().model_dump())
    differ = {name: value for name, value in chosen.items() if value is not None and usual.get(name, usual) != value}
    words = [
        f"{name}={value if isinstance(value, str) else orjson.dumps(value).decode()}" for name, value in differ.items()
    ]
    return " \\\n  ".join([f"tokenmill {KINDS[manifest['type']].command} blend.json --output-dir OUT", *words])


def _flat(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{within}{name}.") if isinstance(value, dict) and value else {f"{within}{name}": value}
    return found


# Sections that are the same for the same data
SECTIONS = (
    Section("To act on", frozenset(), to_act_on),
    Section("Samples", frozenset({"documents", "packs", "parquet", "lines"}), samples),
    Section("Overview", frozenset(), overview),
    Section("Files with drops", frozenset(), worst_files),
    Section("Weights", frozenset(), planned_and_realised),
    Section("Phases", frozenset({"documents"}), phases_of_training),
    Section("Lengths", frozenset({"documents", "packs", "parquet", "lines"}), document_lengths),
    Section("Tokens per byte", frozenset({"documents", "packs", "parquet"}), density),
    Section("Packing", frozenset({"packs"}), packing),
    Section("Loss masks", frozenset({"packs"}), masks),
    Section("Licenses, languages and domains", frozenset(), contents),
    Section("Make it again", frozenset(), identity),
)

THIS_RUN = "This run"


def this_run(run: Measured) -> list[Block]:
    """Show times, versions and the work of every shard. A different run of the same preparation has others."""
    volatile = run.manifest["volatile"]
    shards = volatile["shards"]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(volatile["created_at"]))
    rows: list[tuple[Cell, Cell]] = [
        ("published", when),
        ("seconds", f"{volatile['seconds']:.1f}"),
        ("shards built", shards["built"]),
        ("shards reused", shards["reused"]),
        *volatile["versions"].items(),
        *(
            (f"format of {name}", version)
            for name, version in {each["kind"]: each["format_version"] for each in run.manifest["recipes"]}.items()
        ),
        ("page written by", _writer()),
    ]
    found: list[Block] = [Table("Run", ("what", "value"), rows)]
    keys = list(dict.fromkeys(entry["key"] for entry in run.entries))
    # A run knows the receipts of the shards that it built
    read = iter(in_threads(run.store.read_receipt, [key for key in keys if key not in run.known], THREADS))
    receipts = {key: run.known.get(key) or next(read) for key in keys}
    timed = {key: receipt for key, receipt in receipts.items() if receipt and "seconds" in receipt.volatile}
    if not timed:
        return found
    files = {entry["key"]: entry["file"] for entry in run.entries}
    slowest: list[tuple[Cell, ...]] = []
    for key, receipt in sorted(timed.items(), key=lambda each: -each[1].volatile["seconds"])[:MOST_FILES]:
        seconds, size = receipt.volatile["seconds"], receipt.volatile.get("source_bytes", 0) / 1e6
        speed = f"{size / max(seconds, 1e-6):,.1f}"
        slowest.append((_short_place(files[key]), key[:8], f"{seconds:.2f}", f"{size:,.2f}", speed))
    heads = ("file", "shard", "seconds", "MB", "MB/s")
    return [*found, *_throughput(list(timed.values())), Table("Slowest shards", heads, slowest)]


def _writer() -> str:
    """The version of tokenmill with the digest of the code that writes pages and cards."""
    from tokenmill.tasks.shards.code import built_with  # noqa: PLC0415 - takes 50 ms, and a page that agrees needs none of it

    return f"tokenmill {built_with('tokenmill.tasks.report', ())['tokenmill']}"


MOST_TIMES = 24


def _throughput(receipts: Sequence[Receipt]) -> list[Block]:
    """Source bytes per second over the time in which the shards were built, by any run."""
    ends = np.array([receipt.volatile["built_at"] for receipt in receipts])
    sizes = np.array([receipt.volatile.get("source_bytes", 0) for receipt in receipts])
    start = float((ends - [receipt.volatile["seconds"] for receipt in receipts]).min())
    span = max(float(ends.max()) - start, 1e-3)
    # A shard counts when it is finished
    bins = min(MOST_TIMES, len(receipts))
    if bins < 2:  # noqa: PLR2004 - one bin shows no course
        return []
    places = np.minimum(((ends - start) / span * bins).astype(int), bins - 1)
    rates = (np.bincount(places, sizes, bins) / (span / bins) / 1e6).round(3).tolist()
    labels = [f"{span * at / bins:,.{0 if span >= bins else 2}f}s" for at in range(bins)]
    return [columns("Throughput: when shards were finished", rates, labels, "MB of source per second")]


def sections(run: Measured) -> dict[str, html.Rendered]:
    """Return the sections that are the same for the same data, by title: tables and charts, which a notebook shows."""
    found: dict[str, html.Rendered] = {}
    for section in (each for each in SECTIONS if not each.needs or run.format in each.needs):
        try:
            parts = section.parts(run)
        except (InputError, RunError, FileNotFoundError) as error:  # a tokenizer or a shard isn't here
            parts = [Text(f"{NOT_SHOWN}{error}")]
        if parts:
            found[section.title] = html.Rendered(parts)
    return found


# Words of a page that this project coined, explained at its end where it has them
GLOSSARY = {
    "target share": "the share that the blend's weights ask for",
    "epochs": "how often a dataset is read in a training run",
    "pack": "sequences that fill one row of training",
    "quarantine": "a folder with the rows that can't be used, each with file, line and reason",
    "shard": "what one slice of a file became, in a folder with a receipt of its counts and hashes",
    "trained on": "tokens that the loss is computed on",
}


def page(run: Measured) -> str:
    """Return the page."""
    found = {**sections(run), THIS_RUN: this_run(run)}
    name = KINDS[run.manifest["type"]].command
    title = f"tokenmill {name}: {counted(run.manifest['totals']['documents'], 'document')}"
    text = html.page(title, found)  # once without the glossary, which would have all of its words
    words = [f"{word}: {meaning}" for word, meaning in GLOSSARY.items() if word in text]
    return html.page(title, found, [Items(words), Text("More: docs/report.md and docs/concepts.md of tokenmill.")])


def publish_page(run: Measured, place: str | None = None) -> Output:
    """Write the page of a published preparation to `place`, report.html in its folder by default; errors as in `publish`."""
    return publish_bytes(absolute(place or join(run.path, PAGE)), page(run).encode())


def leave_report(
    output_dir: str, warn: Callable[[str], object], known: Mapping[str, Receipt] = MappingProxyType({})
) -> None:
    """Write the page and the cards at the end of a run, which knows the receipts of its shards.

    The data are published, so a failure is only a warning.
    """
    try:
        run = measured(output_dir, known)
        publish_page(run)
        publish_cards(run)
    except (InputError, RunError, OSError, ValueError, LookupError, ArithmeticError) as error:  # from any data
        warn(
            f"{join(output_dir, PAGE)}: no report was written ({type(error).__name__}: {error}), but the data are published; "
            f"try again with: tokenmill report {output_dir}"
        )


def report_problems(output_dir: str) -> tuple[list[str], list[str]]:
    """Return the figures of a written page and of cards that the published files do not give, and those that can't be compared.

    Parts that need a tokenizer can't be compared if it isn't found, or wasn't when the page was written. Other code
    writes other pages, so a difference from its page isn't evidence.
    """
    place = join(output_dir, PAGE)
    content = read_bytes(place)
    if content is None:
        return card_problems(output_dir), []
    text, problems, unchecked = content.decode(errors="replace"), list[str](), list[str]()
    again = f"write it again: tokenmill report {output_dir}"
    for title, parts in sections(measured(output_dir)).items():
        # A section is found as it is, or with the reason why it was omitted, which may name a place
        here = html.section(title, parts)
        left_out = "".join(html.section(title, [Text(NOT_SHOWN)]).partition(NOT_SHOWN.strip())[:2])
        absent = next((part.text for part in parts if isinstance(part, Text) and part.text.startswith(NOT_SHOWN)), None)
        if here in text:
            continue
        if absent:
            unchecked.append(f"the section {title!r} of {place}: {absent.removeprefix(NOT_SHOWN)}")
        elif left_out in text:
            unchecked.append(f"the section {title!r} of {place}, which was omitted when it was written; {again}")
        else:
            problems.append(f"{place}: the section {title!r} does not agree with the published files; {again}")
    problems += card_problems(output_dir)
    if problems and _writer() not in text:
        return [], [*unchecked, f"{place} and its cards, which other code of tokenmill wrote; {again}"]
    return problems, unchecked
