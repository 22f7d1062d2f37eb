"""Log lineage to Weights & Biases if WANDB_PROJECT is set: datasets and tokenizer in, a preparation out, and tables.

Only `blend.json`, `manifest.json` and small tables are uploaded; datasets and shards are references. WANDB_ENTITY, WANDB_NAME,
WANDB_GROUP, WANDB_TAGS and WANDB_MODE (`offline` writes to ./wandb, for a later `wandb sync`) have their usual meaning.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.tasks.blend.models import listed_sources
from tokenmill.tasks.errors import InputError, RunError, pip_install
from tokenmill.tasks.shards.manifest import BLEND, MANIFEST
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, is_local, join

PROJECT = "WANDB_PROJECT"
LONGEST = 128


def log_if_asked(manifest: Manifest, output_dir: str, warn: Callable[[str], object]) -> None:
    """Log a preparation if WANDB_PROJECT is set; failures are passed to `warn`, and never roll back a publication."""
    if not os.environ.get(PROJECT):
        return
    try:
        log_preparation(manifest, output_dir)
    except (InputError, RunError) as error:
        warn(f"not logged to Weights & Biases: {error}")


def log_preparation(manifest: Manifest, output_dir: str) -> None:
    """Log a preparation as its own run.

    Raises InputError if the package is not installed, and RunError if it cannot log.
    """
    try:
        import wandb
        from wandb.errors import Error as WandbError
    except ImportError as error:
        raise InputError(f"{PROJECT} is set, but wandb isn't installed: {pip_install('wandb')}, or unset it") from error
    try:
        _log(wandb, manifest, output_dir)
    except (WandbError, OSError) as error:
        raise RunError(f"{error}; check WANDB_API_KEY and the network, or set WANDB_MODE=offline") from error


def _log(wandb: Any, manifest: Manifest, output_dir: str) -> None:  # noqa: ANN401 - wandb is imported late
    with wandb.init(job_type="data-prep", tags=["data-prep", manifest["type"]], config=manifest["settings"]) as run:
        for source in [source for split in listed_sources(manifest["blend"]).values() for source in split]:
            metadata = {name: value for name, value in source.items() if value is not None}
            artifact = wandb.Artifact(
                artifact_name(f"{source['path']}-{source.get('subset') or ''}"), "dataset", metadata=metadata
            )
            _refer(artifact, source["path"])
            _take(run, artifact)
        if "tokenizer" in manifest:
            tokenizer = manifest["settings"]["tokenizer"]
            _take(run, wandb.Artifact(artifact_name(tokenizer["model"]), "tokenizer", metadata=tokenizer))
        run.log_artifact(_output(wandb, manifest, output_dir), aliases=["latest"])
        tables = {"plan": plan_rows(manifest), "progress": progress_rows(manifest), "stage": stage_rows(manifest)}
        for name, rows in tables.items():
            run.log(
                {f"{manifest['type']}/{name}_table": wandb.Table(list(rows[0]), [list(row.values()) for row in rows])}
            )
        run.summary.update({name: manifest["totals"][name] for name in ("rows", "documents", "tokens")})


def plan_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the plan, a row per dataset; sizes in bytes."""
    shards, settings = _shards(manifest), manifest["settings"]
    return [
        {
            "dataset_name": source["name"], "path": source["path"],
            "size": manifest["totals"]["datasets"].get(f"{split}/{source['name']}", {}).get("source_bytes", 0),
            "weight": source["weight"], "split": source.get("split") or split, "subset": source.get("subset") or "",
            "num_shards": shards[split, source["name"]],
            **{name: str(settings.get(name, "")) for name in ("scale", "sample")},
        }
        for split, sources in listed_sources(manifest["blend"]).items()
        for source in sources
    ]  # fmt: skip


def progress_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the result, a row per dataset."""
    shards = _shards(manifest)
    return [
        {
            "dataset_name": name.partition("/")[2], "size": counts["source_bytes"],
            "total_shards": shards[tuple(name.split("/", 1))], "total_tokens": counts["tokens"],
            "total_sequences": counts["documents"], "dropped": sum(counts["dropped"].values()),
            "status": "completed" if counts["documents"] else "empty",
        }
        for name, counts in manifest["totals"]["datasets"].items()
    ]  # fmt: skip


def stage_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the timing of the run, in one row: `seconds` of the whole run, and its `speed` in built shards per second."""
    # One row: all stages of a shard are one task, so it doesn't wait in queues between them
    shards, seconds = manifest["volatile"]["shards"], manifest["volatile"]["seconds"]
    return [
        {
            "stage": manifest["type"], "tasks": shards["total"], "built": shards["built"],
            "reused": shards["reused"], "seconds": seconds, "speed": shards["built"] / seconds,
            "workers": manifest["volatile"]["settings"].get("workers") or "all",
        }
    ]  # fmt: skip


def _shards(manifest: Manifest) -> Counter[tuple[str, ...]]:
    """Shards by split of the blend and dataset."""
    return Counter((entry["split"], entry["dataset"]) for entry in manifest["shards"])


def _take(run: Any, artifact: Any) -> None:  # noqa: ANN401 - wandb is imported late
    if run.offline:  # inputs can't be looked up, so it is logged as an output
        run.log_artifact(artifact)
    else:
        run.use_artifact(artifact)


def artifact_name(uri: str) -> str:
    """Return a URI as an artifact name: without its scheme, and with allowed characters only."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", uri.partition("://")[2] or uri).strip("-")[-LONGEST:]


def _output(wandb: Any, manifest: Manifest, output_dir: str) -> Any:  # noqa: ANN401 - wandb is imported late
    metadata = {
        "path": output_dir,
        **{name: manifest["totals"][name] for name in ("rows", "documents", "tokens", "splits")},
    }
    artifact = wandb.Artifact(artifact_name(f"{manifest['type']}-{output_dir}"), manifest["type"], metadata=metadata)
    for name in (BLEND, MANIFEST):
        content = read_bytes(join(output_dir, name))
        if content is not None:
            with artifact.new_file(name, "wb") as file:
                file.write(content)
    _refer(artifact, join(output_dir, MANIFEST))
    return artifact


def _refer(artifact: Any, place: str) -> None:  # noqa: ANN401 - wandb is imported late
    """Add a reference to a file or URI. Local folders and globs go only into the metadata: all files would be listed."""
    if not is_local(place):
        artifact.add_reference(place, checksum=False)
    elif Path(absolute(place)).is_file():
        artifact.add_reference(f"file://{absolute(place)}", name="location", checksum=False)
