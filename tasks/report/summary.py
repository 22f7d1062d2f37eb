"""Summarize a manifest: data in and out, by data set, and what was dropped and why."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from tokenmill.tasks.blend.models import SPLITS, listed_sources
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.storage import join

PAGE = "report.html"
"""The page of a preparation, in its folder."""

COLUMNS = ("data set", "share", "rows", "documents", "dropped", "tokens")


def _hint(manifest: Mapping[str, Any], output_dir: str) -> str:
    """The next steps, without settings for empty splits."""
    lines = preparation(manifest["type"]).next_steps.format(output_dir, manifest=manifest).split("\n")
    return "\n".join(line for line in lines if not line.endswith("="))


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def artifact_record(manifest: Mapping[str, Any], output_dir: str) -> dict[str, Any]:
    """The artifact record for the next command."""
    totals = manifest["totals"]
    record = {
        "path": output_dir,
        "type": manifest["type"],
        "shards": manifest["volatile"]["shards"],
        "rows": totals["rows"],
        "documents": totals["documents"],
        "dropped": totals["dropped"],
        "not_read": totals.get("not_read", {}),
        "tokens": totals["tokens"],
        "splits": splits_of(manifest),
        "missing": len(manifest["missing"]),
        "warnings": manifest.get("warnings", []),
        "made_from": [
            {"type": "data", "path": path}
            for path in dict.fromkeys(
                source["path"] for split in listed_sources(manifest["blend"]).values() for source in split
            )
        ],
    }
    return {manifest["type"]: record}


def splits_of(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    """Documents and tokens by split, in the order train, valid, test."""
    found = manifest["totals"]["splits"]
    return {split: found[split] for split in SPLITS if split in found}


def data_set_rows(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table row per data set."""
    return [
        _row(name, counts, _weight(manifest, name), _total_weight(manifest, name))
        for name, counts in manifest["totals"]["datasets"].items()
    ]


def _row(name: str, counts: Mapping[str, Any], weight: float, total: float) -> dict[str, Any]:
    share = f"{weight / total:.1%}" if total else "0.0%"
    dropped = sum(counts["dropped"].values())
    cells = (name.removeprefix("datasets/"), share, counts["rows"], counts["documents"], dropped, counts["tokens"])
    return dict(zip(COLUMNS, cells, strict=True))


def _weight(manifest: Mapping[str, Any], name: str) -> float:
    """The weight of a data set; in training, the tokens that a budget reads of it."""
    part, _, data_set = name.partition("/")
    phases = manifest.get("phases", []) if part in ("datasets", "train") else []
    if phases:
        return sum(phase["drawn"].get(data_set, 0.0) for phase in phases)
    return next(source["weight"] for source in manifest["blend"][part] if source["name"] == data_set)


def _total_weight(manifest: Mapping[str, Any], name: str) -> float:
    part = name.partition("/")[0]
    return sum(_weight(manifest, f"{part}/{source['name']}") for source in manifest["blend"][part])


def markdown(manifest: Mapping[str, Any], output_dir: str) -> str:
    """The summary as Markdown, for the Prefect UI."""
    totals, shards = manifest["totals"], manifest["volatile"]["shards"]
    lines = [
        (
            f"**{totals['documents']:,} documents** with {totals['tokens']:,} tokens from {totals['rows']:,} rows, "
            f"published in `{output_dir}`."
        ),
        "",
        f"Built {counted(shards['built'], 'shard')}, reused {shards['reused']:,}.",
        "",
        "| split | documents | tokens |",
        "|---|---:|---:|",
        *(f"| {name} | {part['documents']:,} | {part['tokens']:,} |" for name, part in splits_of(manifest).items()),
        "",
        *(f"* {line}" for line in preparation(manifest["type"]).summary(manifest)),
        "",
        "| dropped because | rows |",
        "|---|---:|",
        *(f"| {reason} | {count:,} |" for reason, count in sorted(totals["dropped"].items())),
        "",
        *(f"* {line}" for line in not_read(manifest)),
        *warnings(manifest),
    ]
    return "\n".join(lines)


def not_read(manifest: Mapping[str, Any]) -> list[str]:
    """A line for each data set whose rows have something that isn't read."""
    return [
        f"{name.removeprefix('datasets/')}: {unread_fields(counts)}"
        for name, counts in manifest["totals"].get("not_read", {}).items()
    ]


def unread_fields(counts: Mapping[str, int]) -> str:
    """`not read: context (1 row), history (1,204 rows)`."""
    return "not read: " + ", ".join(f"{name} ({counted(count, 'row')})" for name, count in counts.items())


def warnings(manifest: Mapping[str, Any]) -> list[str]:
    """Warnings to read before training."""
    found = [
        f"{name}: encoded by the reference tokenizer, a hundred times slower: {'; '.join(map(' '.join, verdict['refused'].items()))}"
        for name, verdict in manifest.get("tokenizer", {}).get("gate", {}).items()
        if verdict["backend"] == "reference"
    ]
    found += [
        f"{name}: has no documents, so its weight cannot be applied"
        for name, counts in manifest["totals"]["datasets"].items()
        if not counts["documents"]
    ]
    found += manifest.get("template", {}).get("warnings", [])
    found += manifest.get("sampling", {}).get("warnings", [])
    found += manifest.get("duplicates", {}).get("warnings", [])
    found += manifest.get("dedup", {}).get("warnings", [])
    weights = {name: _weight(manifest, name) for name in manifest["totals"]["datasets"]}
    amounts = {name: counts["tokens"] or counts["documents"] for name, counts in manifest["totals"]["datasets"].items()}
    found += input_lines(manifest.get("warnings", []), epochs_of(weights, amounts))
    if manifest["missing"]:
        found.append(f"partial: {len(manifest['missing'])} planned shards are missing from this output")
    return found


INPUT_SENTENCES = {
    "unread_files": "{datasets}: not read: {files} ({size}): {what}; convert them, or name what to read with a glob",
    "unread_split": "{datasets}: not read: {files} ({size}): {what}; name the split to read it",
    "unread_format": "{datasets}: not read: {files} ({size}): {what}; name a folder or a glob to read them",
    "unread_subset": "{datasets}: not read: {files} ({size}): {what}; name the subset, a folder or a glob to read them",
    "read_twice": "{datasets}: the same content is read {times} times{epochs} ({files}, {size}): {what}",
}
"""What is said about each kind of warning about inputs."""


def input_lines(found: Iterable[Mapping[str, Any]], epochs: Mapping[str, float]) -> Iterator[str]:
    """Sentences about warnings of inputs, as a manifest has them; `epochs` are those of each data set in a run."""
    for warning in found:
        reads: Mapping[str, int] = warning["reads"]
        together = len({name.partition("/")[0] for name in reads}) == 1
        total = sum(count * epochs.get(name, 0) for name, count in reads.items() if together)
        yield INPUT_SENTENCES[warning["kind"]].format(
            datasets=" and ".join(name.removeprefix("datasets/") for name in reads),
            files=counted(warning["files"], "file"),
            size=decimal(warning["bytes"]),
            what=warning["what"],
            times=sum(reads.values()),
            epochs=f", {total:,.2f} epochs in all" if total else "",
        )


def epochs_of(weights: Mapping[str, float], amounts: Mapping[str, float]) -> dict[str, float]:
    """How often a run over as much as its split has reads each data set (by `split/name`) that isn't empty."""
    there, total = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, weight in weights.items():
        there[name.partition("/")[0]] += amounts.get(name, 0)
        total[name.partition("/")[0]] += weight
    return {
        name: there[split] * weight / total[split] / amounts[name]
        for name, weight in weights.items()
        if amounts.get(name) and total[split := name.partition("/")[0]]
    }


def print_summary(manifest: Mapping[str, Any], output_dir: str, console: Console) -> None:
    """Print the summary."""
    table = Table(*COLUMNS, title="prepared", title_justify="left")
    table.columns[0].no_wrap = True
    for row in data_set_rows(manifest):
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row.values()))
    console.print(table)
    totals, shards = manifest["totals"], manifest["volatile"]["shards"]
    for split, part in splits_of(manifest).items():
        console.print(f"  {split:<6} {part['documents']:>12,} documents  {part['tokens']:>15,} tokens")
    for line in preparation(manifest["type"]).summary(manifest):
        console.print(f"  {line}")
    for reason, count in sorted(totals["dropped"].items()):
        console.print(f"  dropped {counted(count, 'row')}: {reason}")
    for line in not_read(manifest):
        console.print(f"  {line}", markup=False)
    for warning in warnings(manifest):
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    console.print(
        f"built {counted(shards['built'], 'shard')}, reused {shards['reused']:,}, in {manifest['volatile']['seconds']:.1f} s\n"
        f"page:  {escape(join(output_dir, PAGE))}\n"
        f"next:  tokenmill verify {escape(quote(output_dir))}\n"
        f"{escape(_hint(manifest, quote(output_dir)))}",
        soft_wrap=True,
    )
