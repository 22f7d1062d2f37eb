"""The steps that no preparation can leave out, each timed alone on one thread (see `roofline`).

    parse   read blocks of 1 MB, `orjson.loads` on every line, one Arrow large_string array a block
    load    gigatoken reads the vocabulary
    encode  gigatoken on those arrays, over Arrow's own buffers, with a fresh cache, as a worker begins
    write   the ids as int32 to a new file, a block at a time

    python -m tests.benchmarks.roofline_steps CORPUS TOKENIZER_FOLDER OUT

Prints the CPU seconds of each as JSON.
"""

import gzip
import json
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import awkward as ak
import gigatoken
import numpy as np
import orjson
import pyarrow as pa

BLOCK = 1 << 20


def blocks(corpus: str) -> Iterator[pa.LargeStringArray]:
    """The texts of about `BLOCK` bytes of whole lines at a time."""
    rest = b""
    with Path(corpus).open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            end = block.rfind(b"\n") + 1
            lines, rest = rest + block[:end], rest[: 0 if end else None] + block[end:]
            if end:
                yield pa.array([orjson.loads(line)["text"] for line in lines.split(b"\n") if line], pa.large_string())


def parse(corpus: str) -> float:
    """CPU seconds to read and parse."""
    start = time.process_time()
    for _ in blocks(corpus):
        pass
    return time.process_time() - start


def load_encode_and_write(corpus: str, tokenizer: str, out: str) -> tuple[float, float, float]:
    """CPU seconds to load, encode, and write what was encoded; reading and parsing are not on the clock."""
    ranks = _unpacked(out) if tokenizer == "o200k_harmony" else None
    started = time.process_time()
    encoder = gigatoken.Tokenizer.from_tiktoken(ranks, "o200k", {}) if ranks else gigatoken.Tokenizer(tokenizer)
    loading = time.process_time() - started
    encoding = writing = 0.0
    with Path(out).open("wb", buffering=0) as file:
        for texts in blocks(corpus):
            started = time.process_time()
            ids = encoder.encode_batch(over_arrow(texts), parallel=False).layout.content.data
            encoding += time.process_time() - started
            data = memoryview(np.asarray(ids).astype(np.int32)).cast("B")
            started = time.process_time()
            file.write(data)
            writing += time.process_time() - started
    return loading, encoding, writing


def _unpacked(out: str) -> Path:
    """The ranks of o200k that bpe-openai ships, as a file."""
    ranks = Path(f"{out}.tiktoken")
    packed = resources.files("bpe_openai.data").joinpath("o200k_base.tiktoken.gz").read_bytes()
    ranks.write_bytes(gzip.decompress(packed))
    return ranks


def over_arrow(texts: pa.LargeStringArray) -> ak.Array:
    """The texts as gigatoken takes them, over the same memory."""
    _, offsets, characters = texts.buffers()
    content = ak.contents.NumpyArray(np.frombuffer(characters, np.uint8), parameters={"__array__": "char"})
    bounds = ak.index.Index64(np.frombuffer(offsets, np.int64)[: len(texts) + 1])
    return ak.Array(ak.contents.ListOffsetArray(bounds, content, parameters={"__array__": "string"}))


def main() -> None:
    """Time the steps, with the arguments of the module's docstring."""
    corpus, tokenizer, out = sys.argv[1:]
    parsing = parse(corpus)
    loading, encoding, writing = load_encode_and_write(corpus, tokenizer, out)
    print(json.dumps({"parse": parsing, "load": loading, "encode": encoding, "write": writing}))


if __name__ == "__main__":
    main()
