"""The peer: Megatron-Bridge's own dataset of packs and its collate function, and what they make of our Parquet.

    python tests/peers/bridge_in_turn.py PEERS PATTERN LENGTH EOS > FOUND

PATTERN names the files, LENGTH is the size of a pack. What is found is a mapping per pack: `tokens`, `labels`, `loss_mask`,
`position_ids` and the borders of sequences, as the trainer hands them to the model. A process of its own, because the
namespace `megatron` may be installed in an older version as well.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tests.peers.megatron_in_turn import prepare


def main() -> None:
    """Print every pack as a micro-batch of one."""
    peers, pattern, length, eos = sys.argv[1:]
    answer, sys.stdout = sys.stdout, sys.stderr  # the peer prints
    prepare(peers)
    for name in ("megatron.bridge.data", "megatron.bridge.data.packing", "megatron.bridge.data.datasets"):
        package = ModuleType(name)  # their `__init__` import every model
        package.__path__ = [str(Path(peers, *name.split(".")))]
        sys.modules[name] = package
    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset  # noqa: PLC0415

    tokenizer = SimpleNamespace(eos_id=int(eos), eod=int(eos), space_sensitive=False)
    packs = GPTSFTPackedParquetDataset(
        file_path=pattern,
        tokenizer=tokenizer,
        max_seq_length=int(length),
        pad_to_max_length=True,
        is_test=True,
        prompt_template="{text} {answer}",
    )
    found = []
    for number in range(len(packs)):
        batch = packs.collate_fn([packs[number]])
        found.append({key: value.tolist() for key, value in batch.items() if hasattr(value, "tolist")})
    json.dump(found, answer)


if __name__ == "__main__":
    main()
