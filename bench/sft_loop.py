"""The peer: the straightforward way to packed SFT data, as scripts do it with `transformers`, one conversation at a time.

For every message the conversation up to it is rendered with `apply_chat_template` (with the generation prompt where an
assistant follows); what the rendering grew by is the message's chunk; each chunk is encoded by itself with the
tokenizer, and the chunks of the assistant get a mask of ones. With reasoning there is one such pass per user turn, as
the template strips reasoning from earlier ones. Sequences that fit a pack are packed first-fit in a shuffled order, and
written as Parquet from Python lists. NVIDIA's data preparation for Nemotron works this way.

It is written to favor itself: the tokenizer is called without the layer that transformers puts around it, a rendering
is not compared with the one that it grew from, and nothing is checked, spooled or resumed. It holds everything in memory,
60 bytes a token, which at 2 MB/s is not what limits it.

    python -m bench.sft_loop CORPUS TOKENIZER_FOLDER TEMPLATE PACK_SIZE OUT
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

Message = dict[str, Any]
Sequence = tuple[list[int], list[int]]


def chunks(tokenizer: Any, messages: list[Message], first: int) -> Iterator[tuple[str, bool]]:
    """The text that each message adds, and whether the model generates it; the first chunk is all before `first`."""
    written = ""
    for number in range(first, len(messages) + 1):
        follows = number < len(messages) and messages[number]["role"] == "assistant"
        thinks = follows and bool(messages[number].get("reasoning_content"))
        rendered = tokenizer.apply_chat_template(
            messages[:number], tokenize=False, add_generation_prompt=follows, enable_thinking=thinks
        )
        yield rendered[len(written) :], number > first and messages[number - 1]["role"] == "assistant"
        written = rendered


def encode(tokenizer: Any, messages: list[Message], first: int) -> Sequence:
    """Ids and mask of one sequence."""
    ids: list[int] = []
    mask: list[int] = []
    for text, learned in chunks(tokenizer, messages, first):
        found = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += found
        mask += [int(learned)] * len(found)
    return ids, mask


def sequences(tokenizer: Any, messages: list[Message]) -> Iterator[Sequence]:
    """One sequence, or one per user turn when there is reasoning."""
    if not any(message.get("reasoning_content") for message in messages):
        yield encode(tokenizer, messages, 1)
        return
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    for start, stop in zip(users, [*users[1:], len(messages)], strict=True):
        yield encode(tokenizer, messages[:stop], start + 1)


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Bins of sequences, in a shuffled order, each into the first bin that takes it."""
    order = list(range(len(lengths)))
    random.Random(42).shuffle(order)
    rooms: list[int] = []
    bins: list[list[int]] = []
    for number in order:
        for place, room in enumerate(rooms):
            if room >= lengths[number]:
                bins[place].append(number)
                rooms[place] -= lengths[number]
                break
        else:
            bins.append([number])
            rooms.append(capacity - lengths[number])
    return bins


def row(found: list[Sequence], members: list[int]) -> dict[str, list[int]]:
    """One pack, with the mask shifted within each sequence."""
    ids: list[int] = []
    mask: list[int] = []
    starts: list[int] = []
    for number in members:
        starts.append(len(ids))
        ids += found[number][0]
        mask += [*found[number][1][1:], 0]
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}


def main() -> None:
    """Prepare one file, with the arguments of the module's docstring."""
    corpus, folder, template, pack_size, out = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = Path(template).read_text("utf-8")
    with Path(corpus).open(encoding="utf-8") as lines:
        found = [each for line in lines for each in sequences(tokenizer, json.loads(line)["messages"])]
    found = [each for each in found if len(each[0]) <= int(pack_size)]
    rows = [row(found, members) for members in first_fit([len(ids) for ids, _ in found], int(pack_size))]
    pq.write_table(pa.Table.from_pylist(rows), out, compression="zstd", row_group_size=1000)
    print(json.dumps({"sequences": len(found), "tokens": sum(len(ids) for ids, _ in found)}))


if __name__ == "__main__":
    main()
