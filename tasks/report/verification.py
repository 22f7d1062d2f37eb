"""Verify a preparation with its page and cards, and print the verification."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.executor import RunAll
from tokenmill.tasks.shards.kind import Kind
from tokenmill.tasks.shards.kinds import kind_of
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import ClusterSettings
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import Inspect, Verification, verify
from tokenmill.tasks.storage import absolute

MOST_PROBLEMS = 50

# Bytes that this process checks without workers: 7 s of work for token files in memory. Workers take 3 s to start.
LITTLE_BYTES = 20_000_000_000


def verified(output_dir: str, settings: ClusterSettings) -> Verification:
    """Verify a folder, and the figures on its page and cards if its data are intact. Raises what `verify` does.

    Workers check a large preparation, and any if the `settings` ask for them.
    """
    kind = _kind_in(output_dir)
    with ExitStack() as stack:

        def find_workers(size: int) -> RunAll | None:
            if settings.cluster == "local" and not settings.workers and size < LITTLE_BYTES:
                return None
            from tokenmill.tasks.shards.workers import calls_on_workers

            return stack.enter_context(calls_on_workers(settings, __name__))

        verification = verify(output_dir, inspector_of(output_dir), find_workers)
    if verification.problems or kind is None:  # a page is compared with data that are whole
        return verification
    from .page import report_problems

    problems, unchecked = report_problems(output_dir)
    return replace(verification, problems=problems, unchecked=[*verification.unchecked, *unchecked])


def inspector_of(output_dir: str) -> Inspect:
    """Return the check of a preparation's shards beyond sizes and hashes, where this version knows the form of their files."""
    kind = _kind_in(output_dir)
    return partial(_inspect, kind.inspect, kind.formats) if kind else _nothing_to_inspect


def _kind_in(output_dir: str) -> Kind[Any, Any] | None:
    manifest = read_manifest(absolute(output_dir))
    return kind_of(manifest) if manifest else None


def _inspect(
    inspect: Inspect, formats: Mapping[str, Collection[int]], store: Store, receipt: Receipt
) -> list[str] | None:
    known = formats.get(receipt.identity["kind"], ())
    return inspect(store, receipt) if not formats or receipt.identity["format_version"] in known else None


def _nothing_to_inspect(_store: Store, _receipt: Receipt) -> list[str]:
    return []


def verification_record(verification: Verification, output_dir: str) -> dict[str, Any]:
    """Return the verification as a JSON line for the next command; `path` is the verified folder."""
    counts = {"shards": verification.shards, "files": verification.files, "bytes": verification.size}
    return {"verify": {"path": output_dir, "type": "verification", **counts}}


def print_verification(verification: Verification, output_dir: str, console: Console) -> None:
    """Print every problem with its file, or one line if there is none."""
    for problem in verification.problems[:MOST_PROBLEMS]:
        console.print(f"✗ {problem}", markup=False, highlight=False, soft_wrap=True)
    more = len(verification.problems) - MOST_PROBLEMS
    if more > 0:
        console.print(f"  … and {more:,} more")
    if verification.withdrawn:
        receipts = counted(len(verification.withdrawn), "receipt")
        console.print(f"{receipts} withdrawn: the next run builds those shards again")
    for sentence in verification.unchecked:
        console.print(f"- not checked: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if not verification.problems:
        compared = "hashes and counts" if verification.unchecked else "hashes, formats and counts"
        console.print(
            f"✓ {counted(verification.shards, 'shard')}, {counted(verification.files, 'file')}, {verification.size / 1e6:,.1f} MB: "
            f"{compared} agree in {output_dir}"
        )
