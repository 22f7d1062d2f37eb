"""Summarize a manifest: rows in and documents out by dataset, tokens beside the share that the weights ask for, and drops by reason."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote
from typing import Any
from urllib.parse import quote as url_quote

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from tokenmill.tasks.blend.models import SPLITS, listed_sources
from tokenmill.tasks.kit.parts import Table, counted, table_lines
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.storage import join

PAGE = "report.html"  # the page of a preparation, in its folder
COUNTS = ("dataset", "rows", "kept", "dropped")
TOKENS = ("tokens", "token share")
TARGETS = ("target share", "epochs")

# Epochs of a dataset beyond which repeated tokens are worth less and less (https://arxiv.org/abs/2305.16264).
MOST_EPOCHS = 4


def next_commands(manifest: Manifest, output_dir: str) -> list[str]:
    """Return the commands to run next, as a shell takes them."""
    place = quote(output_dir)
    steps = preparation(manifest["type"]).next_steps.format(place, manifest=manifest)
    return [f"tokenmill verify {place}", *steps.splitlines()]


def artifact_record(manifest: Manifest, output_dir: str) -> dict[str, Any]:
    """Return the artifact record for the next command."""
    totals = manifest["totals"]
    paths = dict.fromkeys(source["path"] for split in listed_sources(manifest["blend"]).values() for source in split)
    record = {
        "path": output_dir, "type": manifest["type"], "shards": manifest["volatile"]["shards"], "rows": totals["rows"],
        "documents": totals["documents"], "dropped": totals["dropped"], "not_read": totals.get("not_read", {}),
        "tokens": totals["tokens"], "splits": splits_of(manifest), **preparation(manifest["type"]).record(manifest),
        "missing": len(manifest["missing"]), "warnings": manifest.get("warnings", []),
        "made_from": [{"type": "data", "path": path} for path in paths],
    }  # fmt: skip
    return {manifest["type"]: record}


def splits_of(manifest: Manifest) -> dict[str, Mapping[str, int]]:
    """Documents and tokens by split, in the order train, valid, test."""
    found = manifest["totals"]["splits"]
    return {split: found[split] for split in SPLITS if split in found}


def dataset_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Return a table row per dataset: counts; tokens if the kind counts them; target share and epochs if the output follows the weights.

    Shares are of the dataset's own split.
    """
    counts = manifest["totals"]["datasets"]
    columns = COUNTS
    if manifest["totals"]["tokens"]:
        columns += (*TOKENS, *TARGETS) if follows_weights(manifest) else TOKENS
    weights, tokens = _weights(manifest), {name: each["tokens"] for name, each in counts.items()}
    epochs = _epochs(manifest)
    rows = [
        (
            name.removeprefix("datasets/"), each["rows"], each["documents"], sum(each["dropped"].values()), each["tokens"],
            _share(tokens, name), _share(weights, name), f"{epochs[name]:,.2f}" if name in epochs else "-",
        )
        for name, each in counts.items()
    ]  # fmt: skip
    # A row has more values than columns if the kind has no tokens, or doesn't follow the weights
    return [dict(zip(columns, row, strict=False)) for row in rows]


def follows_weights(manifest: Manifest) -> bool:
    """Return whether the output is read in proportion to the blend's weights: Megatron reads documents so, packs and rows are sampled."""
    return preparation(manifest["type"]).tokens == "documents" or manifest["settings"].get("sampling", "none") != "none"


def _share(amounts: Mapping[str, float], name: str) -> str:
    split = name.partition("/")[0]
    total = sum(amount for other, amount in amounts.items() if other.partition("/")[0] == split)
    return f"{amounts[name] / total:.1%}" if total else "-"


def _weights(manifest: Manifest) -> dict[str, float]:
    """The weight of each dataset; in training, the tokens that a budget reads of it."""
    found: dict[str, float] = {}
    for name in manifest["totals"]["datasets"]:
        part, _, dataset = name.partition("/")
        if phases := manifest.get("phases", []) if part in ("datasets", "train") else []:
            found[name] = sum(phase["drawn"].get(dataset, 0.0) for phase in phases)
        else:
            found[name] = next(each["weight"] for each in manifest["blend"][part] if each["name"] == dataset)
    return found


def _epochs(manifest: Manifest) -> dict[str, float]:
    """Return how often each dataset is read, by `split/name`: as in the budget, or in a run over as many tokens as there are."""
    weights = _weights(manifest)
    tokens = dict.fromkeys(manifest["totals"]["datasets"], 0)
    if "phases" in manifest:
        totals = {name: each["tokens"] for name, each in manifest["totals"]["datasets"].items()}
        return {name: weights[name] / totals[name] for name in weights if totals[name]}
    for entry in manifest["shards"]:  # without held-out documents, as training and the report count
        parts = entry["tokens"]
        tokens[f"{entry['split']}/{entry['dataset']}"] += parts.get("train", sum(parts.values()))
    return epochs_of(weights, tokens)


def amount(totals: Mapping[str, Any]) -> str:
    """Return the documents and, if the kind counts them, tokens."""
    tokens = f", {counted(totals['tokens'], 'token')}" if totals["tokens"] else ""
    return f"{counted(totals['documents'], 'document')}{tokens}"


def markdown(manifest: Manifest, output_dir: str) -> str:
    """Return the summary as Markdown, for the Prefect UI."""
    totals, shards = manifest["totals"], manifest["volatile"]["shards"]
    lines = [
        f"**{amount(totals)}** from {counted(totals['rows'], 'row')}, published in `{output_dir}`.",
        "",
        f"Built {counted(shards['built'], 'shard')}, reused {shards['reused']:,}.",
        "",
        *(f"* {name}: {amount(part)}" for name, part in splits_of(manifest).items()),
        "",
        *(f"* {line}" for line in preparation(manifest["type"]).summary(manifest)),
        "",
        *table_lines(Table("Rows dropped", ("dropped because", "rows"), sorted(totals["dropped"].items()))),
        *(f"* {line}" for line in not_read(manifest)),
        *warnings(manifest),
    ]
    return "\n".join(lines)


def report_link(output_dir: str) -> str:
    """Return the URI of the report in an output folder, as a Markdown link that shows it: browsers follow no `file://` link of a server."""
    place = join(output_dir, PAGE)
    uri = url_quote(place if "://" in place else f"file://{place}", safe=":/")
    return f"[{uri}]({uri})"


def not_read(manifest: Manifest) -> list[str]:
    """Return a line for each dataset whose rows have something that isn't read."""
    return [
        f"{name.removeprefix('datasets/')}: {unread_fields(counts)}"
        for name, counts in manifest["totals"].get("not_read", {}).items()
    ]


def unread_fields(counts: Mapping[str, int]) -> str:
    """`not read: context (1 row), history (1,204 rows)`."""
    return "not read: " + ", ".join(f"{name} ({counted(count, 'row')})" for name, count in counts.items())


def warnings(manifest: Manifest) -> list[str]:
    """Warnings to read before training."""
    found = [
        f"{name}: encoded by the reference tokenizer, a hundred times slower: {'; '.join(map(' '.join, verdict['refused'].items()))}"
        for name, verdict in manifest.get("tokenizer", {}).get("gate", {}).items()
        if verdict["backend"] == "reference"
    ]
    found += [
        f"{name}: doesn't have documents, so its weight can't be applied"
        for name, counts in manifest["totals"]["datasets"].items()
        if not counts["documents"]
    ]
    found += manifest.get("template", {}).get("warnings", [])
    found += manifest.get("sampling", {}).get("warnings", [])
    found += manifest.get("duplicates", {}).get("warnings", [])
    found += manifest.get("dedup", {}).get("warnings", [])
    weights = _weights(manifest)
    tokens = {name: each["tokens"] for name, each in manifest["totals"]["datasets"].items()}
    for name, epochs in _epochs(manifest).items() if follows_weights(manifest) else ():
        if epochs > MOST_EPOCHS:
            found.append(
                f"{name.removeprefix('datasets/')}: the weights take {_share(weights, name)} of the reads from "
                f"{_share(tokens, name)} of the tokens, so it is read {epochs:,.1f} times; lower its weight, or add data"
            )
    found += _empty_splits(manifest)
    amounts = {name: counts["tokens"] or counts["documents"] for name, counts in manifest["totals"]["datasets"].items()}
    found += input_lines(manifest.get("warnings", []), epochs_of(weights, amounts))
    if manifest["missing"]:
        found.append(f"partial: {len(manifest['missing'])} planned shards are missing from this output")
    return found


def _empty_splits(manifest: Manifest) -> list[str]:
    """Return a line about requested splits without documents."""
    held_out: Mapping[str, float] = manifest["settings"].get("holdout") or {}
    if "datasets" not in manifest["blend"] or "holdout" in preparation(manifest["type"]).hidden:
        return []
    found, documents = manifest["totals"]["splits"], manifest["totals"]["documents"]
    empty = [split for split in SPLITS if held_out.get(split) and not found.get(split, {}).get("documents")]
    if not empty or not found:  # without any document, other messages are enough
        return []
    settings = " and ".join(f"holdout.{split}={held_out[split]:g}" for split in empty)
    return [
        f"{' and '.join(empty)}: no documents, as {settings} of {counted(documents, 'document')} gives none; raise or clear it"
    ]


# The sentence for each type of input warning
INPUT_SENTENCES = {
    "unread_files": "{datasets}: not read: {files} ({size}): {what}; convert them, or name what to read with a glob",
    "unread_split": "{datasets}: not read: {files} ({size}): {what}; name the split to read it",
    "unread_format": "{datasets}: not read: {files} ({size}): {what}; name a folder or a glob to read them",
    "unread_subset": "{datasets}: not read: {files} ({size}): {what}; name the subset, a folder or a glob to read them",
    "read_twice": "{datasets}: the same content is read {times} times{epochs} ({files}, {size}): {what}",
}


def input_lines(found: Iterable[Mapping[str, Any]], epochs: Mapping[str, float]) -> Iterator[str]:
    """Yield sentences for a manifest's input warnings; `epochs` are each dataset's in a run."""
    for warning in found:
        reads: Mapping[str, int] = warning["reads"]
        together = len({name.partition("/")[0] for name in reads}) == 1
        # Epochs of datasets in different splits don't add up
        total = sum(count * epochs.get(name, 0) for name, count in reads.items() if together)
        yield INPUT_SENTENCES[warning["kind"]].format(
            datasets=" and ".join(name.removeprefix("datasets/") for name in reads),
            files=counted(warning["files"], "file"), size=decimal(warning["bytes"]), what=warning["what"],
            times=sum(reads.values()), epochs=f", {total:,.2f} epochs in all" if total else "",
        )  # fmt: skip


def epochs_of(weights: Mapping[str, float], amounts: Mapping[str, float]) -> dict[str, float]:
    """Return how often a run over as much as its split has reads each dataset (by `split/name`) that isn't empty."""
    there, total = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, weight in weights.items():
        there[name.partition("/")[0]] += amounts.get(name, 0)
        total[name.partition("/")[0]] += weight
    return {
        name: there[split] * weight / total[split] / amounts[name]
        for name, weight in weights.items()
        if amounts.get(name) and total[split := name.partition("/")[0]]
    }


def print_summary(manifest: Manifest, output_dir: str, console: Console) -> None:
    """Print the summary."""
    rows = dataset_rows(manifest)
    print_table(console, Table("prepared", list(rows[0]), [list(row.values()) for row in rows]))
    totals, shards = manifest["totals"], manifest["volatile"]["shards"]
    lines = [f"{split + ':':<6} {amount(part)}" for split, part in splits_of(manifest).items()]
    # The tokenizer and the template are easily forgotten where they are defaults
    settings = manifest["settings"]
    if totals["tokens"] and settings.get("tokenizer"):
        lines.append(f"tokenizer: {settings['tokenizer']['model']}")
    if template := settings.get("chat_template"):
        lines.append(f"chat template: {template.strip().partition(chr(10))[0][:60]}")
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False)
    for line in preparation(manifest["type"]).summary(manifest):
        console.print(f"  {line}")
    for reason, count in sorted(totals["dropped"].items()):
        console.print(f"  dropped {counted(count, 'row')}: {reason}")
    for line in not_read(manifest):
        console.print(f"  {line}", markup=False)
    for warning in warnings(manifest):
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=not console.is_terminal)
    following = "\n        ".join(next_commands(manifest, output_dir))
    console.print(
        f"built {counted(shards['built'], 'shard')}, reused {shards['reused']:,}, in {manifest['volatile']['seconds']:.1f} s\n"
        f"report: {escape(join(output_dir, PAGE))}\n"
        f"next:   {escape(following)}",
        soft_wrap=True,
    )
