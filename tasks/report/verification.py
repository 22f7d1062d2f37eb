"""Print a verification."""

from dataclasses import replace
from typing import Any

from rich.console import Console
from tokenmill.tasks.shards.kinds import kind_of
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import Inspect, Verification
from tokenmill.tasks.storage import absolute

from .summary import counted

MOST_PROBLEMS = 50


def inspector_of(output_dir: str) -> Inspect:
    """The check of a preparation's shards beyond sizes and hashes, where this version knows the form of their files."""
    manifest = read_manifest(absolute(output_dir))
    kind = kind_of(manifest) if manifest else None

    def inspect(store: Store, receipt: Receipt) -> list[str] | None:
        if kind is None:
            return []
        known = kind.formats.get(receipt.identity["kind"], ())
        return kind.inspect(store, receipt) if not kind.formats or receipt.identity["format_version"] in known else None

    return inspect


def with_report(verification: Verification, output_dir: str) -> Verification:
    """The verification of a folder, and of the figures on its page and cards if its data are intact."""
    manifest = read_manifest(absolute(output_dir))
    if verification.problems or manifest is None or kind_of(manifest) is None:
        return verification
    from .page import report_problems

    problems, unchecked = report_problems(output_dir)
    return replace(verification, problems=problems, unchecked=[*verification.unchecked, *unchecked])


def verification_record(verification: Verification, output_dir: str) -> dict[str, Any]:
    """The verification as a JSON line for the next command; `path` is the verified folder."""
    return {
        "verify": {
            "path": output_dir,
            "type": "verification",
            "shards": verification.shards,
            "files": verification.files,
            "bytes": verification.size,
        }
    }


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
