"""The straightforward way to Harmony: a row at a time, with `json`, string formatting and string searches.

Each line is parsed, its messages are written as tagged text, and the text is searched again for its tags to find out
whether it is well formed and what it holds; then it becomes a dict in a list, and lists become Parquet. Scripts that
normalize chat data do it like this. It handles what its own corpus has: system, user and assistant messages with
reasoning, no tools.

    python -m bench.harmony_loop SOURCE OUT

Prints the number of rows, of messages, and the CPU seconds without imports, as JSON.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
ROWS = 8192


def rendered(record):
    """The messages of a record as Harmony text."""
    parts = []
    for message in record["messages"]:
        if message["role"] != "assistant":
            parts.append(f"{START}{message['role']}{MESSAGE}{message['content']}<|end|>")
            continue
        if (message.get("reasoning_content") or "").strip():
            parts.append(f"{START}assistant{CHANNEL}analysis{MESSAGE}{message['reasoning_content']}<|end|>")
        parts.append(f"{START}assistant{CHANNEL}final{MESSAGE}{message['content']}<|end|>")
    text = "".join(parts)
    return text.removesuffix("<|end|>") + "<|return|>"


def parsed(text):
    """The messages that are found again: author, channel, body. Raises ValueError where a tag is missing."""
    found, place = [], 0
    while (start := text.find(START, place)) >= 0:
        body = text.find(MESSAGE, start)
        if body < 0:
            raise ValueError("a message tag is missing")
        author, _, channel = text[start + len(START) : body].partition(CHANNEL)
        ends = [(end, tag) for tag in ENDS if (end := text.find(tag, body)) >= 0]
        if not ends:
            raise ValueError("a terminator is missing")
        end, tag = min(ends)
        found.append((author, channel or None, text[body + len(MESSAGE) : end]))
        place = end + len(tag)
    return found


def row(record, number):
    """The columns of a record."""
    text = rendered(record)
    messages = parsed(text)
    last = [body for author, channel, body in messages if author.startswith("assistant") and channel in {"final", None}]
    return {
        "id": hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(),
        "text": text,
        "loss_mode": "assistant_all",
        "quality_valid_harmony": True,
        "quality_completion_nonempty": bool(last and last[-1].strip()),
        "quality_has_tool": "<|call|>" in text,
        "stats_char_len": len(text),
        "num_messages": len(messages),
        "source_row": number,
    }


def main():
    """Normalize one file."""
    source, out = sys.argv[1:]
    started, rows, messages, waiting, writer = time.process_time(), 0, 0, [], None
    with Path(source).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            waiting.append(row(json.loads(line), number))
            rows, messages = rows + 1, messages + waiting[-1]["num_messages"]
            if len(waiting) == ROWS:
                table = pa.Table.from_pylist(waiting)
                writer = writer or pq.ParquetWriter(out, table.schema, compression="zstd")
                writer.write_table(table)
                waiting = []
    table = pa.Table.from_pylist(waiting)
    writer = writer or pq.ParquetWriter(out, table.schema, compression="zstd")
    writer.write_table(table)
    writer.close()
    print(json.dumps({"rows": rows, "messages": messages, "cpu_seconds": time.process_time() - started}))


if __name__ == "__main__":
    main()
