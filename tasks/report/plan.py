"""Print a plan: how much data there is, how much is already built, why the rest is not, and the cost of building it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from tokenmill.tasks.kit.parts import Cell, Table, counted
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.shards.first_rows import FirstRows
from tokenmill.tasks.shards.kind import Planned
from tokenmill.tasks.shards.manifest import identities, published_manifest
from tokenmill.tasks.shards.plan import Finished, PlannedShard, reasons
from tokenmill.tasks.shards.planning import held_out

from .summary import epochs_of, input_lines, unread_fields

# Bytes per token of English web text with a large vocabulary (code, other languages: 2.5 to 4); used if nothing is
# built.
BYTES_PER_TOKEN = 4.0

EXPANSION = 3  # bytes of text in a byte of gzip or zstd: 2.6 in C4 (Raffel et al. 2020), more in code and markup.
BYTES_PER_SECOND = 80e6  # bytes per second that one core tokenizes, from JSON Lines to disk
HELD_OUT = ("valid", "test")
MOST_REASONS = 8
COLUMNS = ("dataset", "target share", "files", "shards", "cached", "size", "kept", "tokens", "epochs")


# The reason for a shard with fingerprints of tokenizers, which people can't read
TOKENIZER_CHANGE = re.compile(r"recipe\.tokenizer changed: '[^']*' -> '[^']*'")


def pending_reasons(planned: Planned[Any, Any]) -> Counter[str]:
    """Count the reasons why shards are pending, compared with the last published manifest; tokenizers have their names."""
    manifest = published_manifest(planned.output_dir)
    before = manifest["settings"].get("tokenizer") if manifest else None
    chosen = [before, planned.settings.model_dump().get("tokenizer")]
    models = [each["model"] for each in chosen if each]
    found = reasons(planned.plan, identities(manifest))
    if len({*models}) < len(chosen):  # one tokenizer, whose files may have changed, or none before
        return found
    name = f"recipe.tokenizer changed: {models[0]} -> {models[1]}"
    return Counter({TOKENIZER_CHANGE.sub(lambda _: name, reason): count for reason, count in found.items()})


def plan_record(
    planned: Planned[Any, Any], outlook: Sequence[str] = (), first_rows: Mapping[str, FirstRows] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the plan as a JSON line for the next command; `outlook` describes later builds."""
    plan = planned.plan
    record = {
        "path": planned.output_dir, "type": "plan", "files": len(_files(plan.shards)),
        "shards": {"total": len(set(plan.keys)), "pending": len(plan.pending), "cached": len(plan.proven)},
        "bytes": {"total": sum(shard.part.size for shard in plan.shards), "pending": plan.pending_bytes},
        "estimated_tokens": sum(estimated_tokens(planned).values()),
        "estimated_kept": {name: asdict(sample) for name, sample in plan.samples.items()},
        "reasons": dict(pending_reasons(planned)), "skipped_files": plan.skipped,
        "warnings": [asdict(warning) for warning in plan.warnings], "outlook": outlook,
        "first_rows": {name: asdict(seen) for name, seen in first_rows.items()},
    }  # fmt: skip
    return {"plan": record}


def estimated_tokens(planned: Planned[Any, Any]) -> dict[str, int]:
    """Tokens per dataset (`split/name`): counted for built and tokenized shards, otherwise estimated from bytes."""
    found: Counter[str] = Counter()
    for shard, key in zip(planned.plan.shards, planned.plan.keys, strict=True):
        receipt = planned.plan.proven.get(key)
        counted = receipt.tokens if receipt else 0
        found[_name(shard)] += counted or round(_kept_bytes(planned, shard) / BYTES_PER_TOKEN)
    return dict(found)


def training_tokens(planned: Planned[Any, Any]) -> tuple[dict[str, int], set[str]]:
    """Training tokens per dataset (documents if nothing is tokenized), and the datasets whose tokens are partly estimates."""
    found: Counter[str] = Counter()
    estimated: set[str] = set()
    for shard, key in zip(planned.plan.shards, planned.plan.keys, strict=True):
        if shard.split in HELD_OUT:
            continue
        receipt = planned.plan.proven.get(key)
        if receipt is not None:
            finished = Finished(shard, key, receipt)
            own = [count for part, count in receipt.parts.items() if finished.split_of(part) == "train"]
            found[shard.dataset] += sum(count.tokens or count.documents for count in own)
        else:
            holdout = held_out(planned.settings, shard.split)
            share = 1 - (holdout["holdout_valid"] + holdout["holdout_test"])
            found[shard.dataset] += round(_kept_bytes(planned, shard) / BYTES_PER_TOKEN * share)
            estimated.add(shard.dataset)
    return dict(found), estimated


def _text_bytes(shard: PlannedShard) -> int:
    """Estimated bytes of a shard's source, decompressed."""
    parts = shard.part.members or [shard.part]
    return sum(part.size * (EXPANSION if part.file.compression else 1) for part in parts)


def _kept_bytes(planned: Planned[Any, Any], shard: PlannedShard) -> float:
    """Estimated bytes of the rows in a shard that the filter of its dataset keeps."""
    sample = planned.plan.samples.get(_name(shard))
    return _text_bytes(shard) * (sample.kept_bytes if sample else 1)


def _name(shard: PlannedShard) -> str:
    return f"{shard.split}/{shard.dataset}"


def print_plan(
    planned: Planned[Any, Any],
    console: Console,
    outlook: Sequence[str] = (),
    first_rows: Mapping[str, FirstRows] = MappingProxyType({}),
    *,
    tables: bool = True,
) -> None:
    """Print the plan: a row for each dataset, as a table or as lines; then pending shards, the `outlook`, and the fate of
    first rows.
    """
    print_table(console, Table("plan", COLUMNS, _rows(planned)), tables=tables)
    console.print(
        "[dim]epochs: in a run over as many tokens as the blend has; tokens of pending shards are estimates[/]"
    )
    plan = planned.plan
    seconds = sum(map(_text_bytes, plan.pending)) / BYTES_PER_SECOND
    console.print(
        f"{len(plan.pending)} of {counted(len(set(plan.keys)), 'shard')} to build, {decimal(plan.pending_bytes)}, "
        f"about {seconds:,.0f} core-seconds"
    )
    for reason, count in pending_reasons(planned).most_common(MOST_REASONS):
        console.print(f"  {counted(count, 'shard')}: {reason}", markup=False)
    for line in outlook:
        console.print(line, markup=False)
    for name, kinds in plan.skipped.items():
        console.print(f"  {name.removeprefix('datasets/')}: {skipped_files(kinds)}", markup=False)
    for name, note in planned.notes.items():
        console.print(f"  {name}: {note}", markup=False)
    for name, seen in first_rows.items():
        # `first 100 rows: 98 documents, 2 dropped (null_text 2)`
        parts = [
            f"{'all' if seen.every else 'first'} {counted(seen.rows, 'row')}: {counted(seen.documents, 'document')}"
        ]
        parts += [f"reads as: {seen.shape}"] if seen.shape else []
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in seen.dropped.items())
        parts += [f"{sum(seen.dropped.values()):,} dropped ({dropped})"] if seen.dropped else []
        parts += [unread_fields(seen.not_read)] if seen.not_read else []
        console.print(f"  {name.removeprefix('datasets/')}: {', '.join(parts)}", markup=False)
    for name, seen in first_rows.items():
        if seen.bad:
            console.print(f"[yellow]warning:[/] {escape(name.removeprefix('datasets/'))}: {escape(seen.bad)}")
    for line in input_lines(map(asdict, plan.warnings), _epochs(planned)):
        console.print(f"[yellow]warning:[/] {escape(line)}")


def skipped_files(kinds: Mapping[str, int]) -> str:
    """Describe the skipped files of a dataset, the most frequent kinds first."""
    listed = ", ".join(f"{count:,} {kind}" for kind, count in Counter(kinds).most_common(MOST_REASONS))
    more = f" and {len(kinds) - MOST_REASONS} other kinds" if len(kinds) > MOST_REASONS else ""
    return f"files skipped: {sum(kinds.values()):,} ({listed}{more})"


def _epochs(planned: Planned[Any, Any]) -> dict[str, float]:
    """The epochs of each dataset with tokens, by `split/name`, in a run over as many tokens as its split has."""
    weights = {
        f"{split}/{source.name}": source.weight
        for split, sources in planned.blend.parts().items()
        for source in sources
    }
    return epochs_of(weights, estimated_tokens(planned))


def _rows(planned: Planned[Any, Any]) -> list[tuple[Cell, ...]]:
    plan, tokens, epochs = planned.plan, estimated_tokens(planned), _epochs(planned)
    rows: list[tuple[Cell, ...]] = []
    for split, sources in planned.blend.parts().items():
        weights = sum(source.weight for source in sources)
        for source in sources:
            name, share = f"{split}/{source.name}", source.weight / weights
            pairs = [(shard, key) for shard, key in zip(plan.shards, plan.keys, strict=True) if _name(shard) == name]
            files, size = _files(shard for shard, _ in pairs), sum(shard.part.size for shard, _ in pairs)
            count, sample = tokens.get(name, 0), plan.samples.get(name)
            rows.append((
                name.removeprefix("datasets/"), f"{share:.1%}", len(files), len(pairs),
                sum(key in plan.proven for _, key in pairs), decimal(size),
                f"{sample.kept_rows:.1%}" if sample else "all", count,
                f"{epochs[name]:,.2f}" if name in epochs else "-",
            ))  # fmt: skip
    return rows


def _files(shards: Iterable[PlannedShard]) -> set[str]:
    return {part.file.uri for shard in shards for part in shard.part.members or [shard.part]}
