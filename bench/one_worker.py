"""What one worker does, as a process of its own: plan a source, pass the gate, build every shard, in order.

Nothing is left out that a preparation does for its data: hashing the source for its identity, comparing the fast
encoder with the reference, hashing and syncing what is written, receipts. Left out are Prefect and Dask, which
`orchestration` measures, and holding documents out, which the peer does not do. This is the one place where the
benchmarks call the product's functions.

    python -m bench.one_worker SOURCE TOKENIZER_FOLDER OUT_DIR [SHARD_SIZE]

SOURCE is a file or a folder, SHARD_SIZE a number of bytes. Prints the CPU seconds of its phases as JSON.
"""

import json
import sys
import time

from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.runtime import set_up_arrow
from tokenmill.tasks.tokenize.kind import PRETRAIN, PretrainPlan, build_pretrain_shard
from tokenmill.tasks.tokenize.settings import PretrainSettings, TokenizerSettings

WHOLE = 1 << 40
"""A shard size that no file exceeds: one shard a file, as the peer makes."""


def plan(source: str, tokenizer: str, out: str, shard_size: int) -> PretrainPlan:
    """The plan for one dataset that is all training data."""
    settings = PretrainSettings(tokenizer=TokenizerSettings(model=tokenizer), shard_size=shard_size)
    return PRETRAIN.plan(Blend(train=[DataSource(name="benchmark", path=source)]), settings, out)


def main() -> None:
    """Prepare one source, with the arguments of the module's docstring."""
    source, tokenizer, out, *rest = sys.argv[1:]
    set_up_arrow()  # as the command does
    imported = time.process_time()
    planned = plan(source, tokenizer, out, int(rest[0]) if rest else WHOLE)
    gated = time.process_time()
    for shard in planned.plan.pending:
        build_pretrain_shard(shard, planned.plan.store, **PRETRAIN.stages[0].arguments(planned))
    built = time.process_time()
    phases = {"import": imported, "plan_and_gate": gated - imported, "build": built - gated}
    print(
        json.dumps(
            {
                "backend": [verdict.backend for verdict in planned.found.verdicts.values()],
                "shards": len(planned.plan.shards),
                "cpu_seconds": phases,
            }
        )
    )


if __name__ == "__main__":
    main()
