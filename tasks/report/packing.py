"""How well an SFT preparation is packed, and how much of it is trained on, in words."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.shards.manifest import WHOLE


def packing_lines(manifest: Mapping[str, Any]) -> list[str]:
    """A sentence per split, and one for each kind of loss that is no drop; none for other kinds of preparation."""
    if manifest["type"] != "sft":
        return []
    splits: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for entry in manifest["shards"]:
        for name in entry["documents"]:
            splits.setdefault(_split(name, entry["split"]), Counter()).update(entry["facts"][name])
        counts.update(
            {name: entry["facts"][name] for name in ("oversize_sequences", "straddled_tokens", "flagged_messages")}
        )
    size = manifest["settings"]["pack_size"]
    lines = [_sentence(split, splits[split], size) for split in SPLITS if split in splits]
    if counts["oversize_sequences"]:
        lines.append(f"{counts['oversize_sequences']:,} sequences do not fit into a pack and are left out")
    if counts["straddled_tokens"]:
        lines.append(f"{counts['straddled_tokens']:,} tokens lie across a border of the loss and are not trained on")
    if counts["flagged_messages"]:
        lines.append(
            f"{counts['flagged_messages']:,} messages are not trained on, or only in part, because the data says so"
        )
    return lines


def _split(part: str, planned: str) -> str:
    if part != WHOLE:
        return part
    return planned if planned in SPLITS else "train"


def _sentence(split: str, facts: Counter[str], pack_size: int) -> str:
    full = (facts["tokens"] + facts["padding"]) / (facts["packs"] * pack_size)
    return (
        f"{split}: {facts['packs']:,} packs of {facts['sequences']:,} sequences, {full:.2%} full, "
        f"{facts['loss_tokens'] / facts['tokens']:.1%} of the tokens trained on"
    )
