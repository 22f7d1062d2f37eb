"""A whole preparation as users start it, `tokenmill pretrain`, with a Prefect home and a cache of its own.

Prefect makes its database on first use, so `warm_up` runs one tiny preparation that is not measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import child
from tests.benchmarks.bench import Bench
from tests.benchmarks.child import Child


@dataclass(frozen=True, slots=True)
class Preparation:
    """A finished run: its process, and the wall seconds from the first shard's beginning to the last one's end."""

    process: Child
    stage_seconds: float


def environment(bench: Bench) -> dict[str, str]:
    """Where Prefect and tokenmill keep what they remember between runs."""
    return {"PREFECT_HOME": str(bench.folder / "prefect"), "XDG_CACHE_HOME": str(bench.folder / "cache")}


def write_blend(path: Path, source: Path | str) -> Path:
    """A blend of one data set."""
    path.write_text(json.dumps({"datasets": [{"name": "benchmark", "path": str(source)}]}), encoding="utf-8")
    return path


def pretrain(bench: Bench, source: Path | str, out: Path, *options: object) -> Preparation:
    """Prepare a source with the first of the run's vocabularies; `options` are the command's own."""
    out.mkdir(parents=True, exist_ok=True)
    blend = write_blend(out / "blend_in.json", source)
    tokenizer = f"tokenizer.model={bench.vocabulary(bench.tokenizers[0]).folder}"
    command = [child.TOKENMILL, "pretrain", blend, "--output-dir", out / "prepared", *options, tokenizer]
    process = child.run([str(word) for word in command], environment(bench))
    return Preparation(process, _stage_seconds(out / "prepared"))


def warm_up(bench: Bench) -> None:
    """A preparation of one document."""
    with bench.scratch() as out:
        pretrain(bench, bench.one_document().path, out, "--workers", 1)


def _stage_seconds(prepared: Path) -> float:
    """From the receipts: every shard says when it was begun and how long it took."""
    times = [json.loads(path.read_bytes())["volatile"] for path in prepared.rglob("receipt.json")]
    return max(time["built_at"] + time["seconds"] for time in times) - min(time["built_at"] for time in times)
