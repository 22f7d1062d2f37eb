"""What one worker does for SFT, as a process of its own: plan, self-check, gate, build every shard, in order, and pack them.

As in `one_worker`, nothing is left out that a preparation does for its data, and Prefect, Dask and held-out documents
are left out. The template is the bundled one of Nemotron 3 Nano, the shard size the default.

    python -m bench.sft_worker SOURCE TOKENIZER_FOLDER OUT_DIR [PACK_SIZE]

Prints what came out, and the CPU seconds of its phases, as JSON.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.pack.kind import SFT, SftPlan
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.runtime import set_up_arrow
from tokenmill.tasks.shards.kind import Stage
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.tokenize.settings import TokenizerSource

PACK_SIZE = SftSettings().pack_size


def plan(source: str, tokenizer: str, out: str, pack_size: int) -> SftPlan:
    """The plan for one dataset that is all training data."""
    source_of_ids = TokenizerSource(model=tokenizer)
    # o200k_harmony lacks nano3's markers, which is an error otherwise.
    settings = SftSettings(tokenizer=source_of_ids, chat_template="nano3", allow_text_markers=True, pack_size=pack_size)
    return SFT.plan(Blend(train=[DataSource(name="benchmark", path=source)]), settings, out)


def build(planned: SftPlan) -> tuple[list[Receipt], list[Receipt]]:
    """Every shard, one after the other, and then all groups of packs; the receipts of both."""
    rounds: list[list[Receipt]] = []

    def build_here(
        stage: Stage, pending: Sequence[PlannedShard], store: Store, arguments: Mapping[str, Any], *, rebuild: bool
    ) -> Sequence[Receipt]:
        del rebuild
        rounds.append([stage.build(shard, store, **arguments) for shard in pending])
        return rounds[-1]

    SFT.build(planned, build_here)
    shards, packs = rounds
    return shards, packs


def counted(shards: Sequence[Receipt], packs: Sequence[Receipt]) -> dict[str, Any]:
    """What came out of the shards; the sequences are those that are in packs."""
    drops = sum((Counter(receipt.drops) for receipt in [*shards, *packs]), Counter[str]())
    parts = [receipt.facts[name] for receipt in packs for name in receipt.parts]
    return {
        "shards": len(shards),
        "conversations": sum(receipt.documents for receipt in packs),
        "drops": dict(drops),
        "oversize_sequences": sum(receipt.facts["oversize_sequences"] for receipt in packs),
        **{name: sum(part[name] for part in parts) for name in ("sequences", "packs", "tokens", "loss_tokens")},
    }


def main() -> None:
    """Prepare one source, with the arguments of the module's docstring."""
    source, tokenizer, out, *rest = sys.argv[1:]
    set_up_arrow()  # as the command does
    imported = time.process_time()
    planned = plan(source, tokenizer, out, int(rest[0]) if rest else PACK_SIZE)
    gated = time.process_time()
    found = counted(*build(planned))
    built = time.process_time()
    found["backend"] = [verdict.backend for verdict in planned.found.verdicts.values()]
    found["cpu_seconds"] = {"import": imported, "plan_check_and_gate": gated - imported, "build": built - gated}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
