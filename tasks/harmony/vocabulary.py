"""The vocabulary of openai-harmony, without a network.

The library downloads `o200k_base.tiktoken` at first use. The `bpe-openai` package ships the same file compressed. It is
unpacked once into the user's cache, atomically (3.6 MB, 0.1 s), and the library reads it from there. The SHA-256 is verified
each time (5 ms). Loading the encoding takes 0.2 s per process.
"""

import gzip
import hashlib
import os
from functools import cache
from importlib import resources
from pathlib import Path

import openai_harmony
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import user_cache
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

VOCABULARY = "o200k_harmony"  # the name of the vocabulary of Harmony text

RANKS = "o200k_base.tiktoken"
RANKS_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"

PLACE = "TIKTOKEN_ENCODINGS_BASE"  # the library's environment variable for the folder with RANKS

IDS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
"""Special tokens with a name."""


def ensure_vocabulary() -> None:
    """Make the library find its vocabulary. If the environment variable names a folder with the right file, it is kept.

    Raises InputError if no installed package has the file, OSError if the user's cache cannot be written.
    """
    named = os.environ.get(PLACE)
    if named and _is_right(Path(named, RANKS)):
        return
    place = Path(user_cache("harmony", RANKS))
    if not _is_right(place):
        # Verified before it is published, so that a wrong package never fills the cache.
        packed = resources.files("bpe_openai.data").joinpath(f"{RANKS}.gz")
        found = gzip.decompress(packed.read_bytes()) if packed.is_file() else b""
        if (digest := hashlib.sha256(found).hexdigest()) != RANKS_SHA256:
            raise InputError(
                f"{packed} has SHA-256 {digest} for {RANKS}, not {RANKS_SHA256}; install "
                f"bpe-openai 0.1.4, or set {PLACE} to a folder that holds the right file"
            )
        publish_bytes(str(place), found)
    os.environ[PLACE] = str(place.parent)


@cache
def encoding() -> openai_harmony.HarmonyEncoding:
    """Return the library's encoding, loaded once per process. Raises as `ensure_vocabulary`."""
    ensure_vocabulary()
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@cache
def harmony_encoder() -> Encoder:
    """Return the encoder of Harmony text with its control tokens."""
    return exact_encoder(find_vocabulary(TokenizerSource(model=VOCABULARY)), "gigatoken", literal=False)


def _is_right(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == RANKS_SHA256
