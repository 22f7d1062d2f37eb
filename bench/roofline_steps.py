"""The steps that no preparation can leave out, each timed alone on one thread (see `roofline`).

    parse   read blocks of 1 MB, `orjson.loads` on every line, one Arrow large_string array a block
    load    the engine reads the vocabulary
    encode  the engine on those arrays, with a fresh cache, as a worker begins: gigatoken over Arrow's own buffers,
            fastokens on lists of strings
    write   the ids as int32 to a new file, a block at a time

    python -m bench.roofline_steps CORPUS TOKENIZER_FOLDER ENGINE OUT

Prints the CPU seconds of each as JSON.
"""

import gzip
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import awkward as ak
import fastokens
import gigatoken
import numpy as np
import orjson
import pyarrow as pa
from tiktoken_ext.openai_public import o200k_base

BLOCK = 1 << 20
O200K = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"


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


Encode = Callable[[pa.LargeStringArray], np.ndarray]


def gigatoken_encoder(tokenizer: str, ranks: Path | None) -> Encode:
    """gigatoken with a vocabulary from a folder, or from the ranks of o200k."""
    encoder = gigatoken.Tokenizer.from_tiktoken(ranks, "o200k", {}) if ranks else gigatoken.Tokenizer(tokenizer)
    return lambda texts: np.asarray(encoder.encode_batch(over_arrow(texts), parallel=False).layout.content.data)


def fastokens_encoder(tokenizer: str, ranks: Path | None) -> Encode:
    """fastokens with a vocabulary from a folder, or from the ranks of o200k."""
    if ranks:
        encoder = fastokens.Tokenizer.from_tiktoken(str(ranks), pattern=o200k_base()["pat_str"])
    else:
        encoder = fastokens.Tokenizer.from_json_str(Path(tokenizer, "tokenizer.json").read_text("utf-8"))
    return lambda texts: np.frombuffer(encoder.encode_batch_flat(texts.to_pylist())[0], np.uint32)


ENGINES = {"gigatoken": gigatoken_encoder, "fastokens": fastokens_encoder}


def load_encode_and_write(corpus: str, tokenizer: str, engine: str, out: str) -> tuple[float, float, float]:
    """CPU seconds to load, encode, and write what was encoded; reading and parsing are not on the clock."""
    ranks = _unpacked(out) if tokenizer == "o200k_harmony" else None
    started = time.process_time()
    encode = ENGINES[engine](tokenizer, ranks)
    loading = time.process_time() - started
    encoding = writing = 0.0
    with Path(out).open("wb", buffering=0) as file:
        for texts in blocks(corpus):
            started = time.process_time()
            ids = encode(texts)
            encoding += time.process_time() - started
            data = memoryview(ids.astype(np.int32)).cast("B")
            started = time.process_time()
            file.write(data)
            writing += time.process_time() - started
    return loading, encoding, writing


def _unpacked(out: str) -> Path:
    """The ranks of o200k that bpe-openai ships, as a file where tiktoken looks for them."""
    folder = Path(out).parent
    ranks = folder / hashlib.sha1(O200K.encode(), usedforsecurity=False).hexdigest()
    packed = resources.files("bpe_openai.data").joinpath("o200k_base.tiktoken.gz").read_bytes()
    ranks.write_bytes(gzip.decompress(packed))
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return ranks


def over_arrow(texts: pa.LargeStringArray) -> ak.Array:
    """The texts as gigatoken takes them, over the same memory."""
    _, offsets, characters = texts.buffers()
    content = ak.contents.NumpyArray(np.frombuffer(characters, np.uint8), parameters={"__array__": "char"})
    bounds = ak.index.Index64(np.frombuffer(offsets, np.int64)[: len(texts) + 1])
    return ak.Array(ak.contents.ListOffsetArray(bounds, content, parameters={"__array__": "string"}))


def main() -> None:
    """Time the steps, with the arguments of the module's docstring."""
    corpus, tokenizer, engine, out = sys.argv[1:]
    parsing = parse(corpus)
    loading, encoding, writing = load_encode_and_write(corpus, tokenizer, engine, out)
    print(json.dumps({"parse": parsing, "load": loading, "encode": encoding, "write": writing}))


if __name__ == "__main__":
    main()
