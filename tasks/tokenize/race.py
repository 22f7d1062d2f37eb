"""Which engine encodes a data set fastest, of those that the gate trusts: they encode the same texts, and the faster one wins.

It depends on the vocabulary and on the processor, so results are cached per user and machine, never part of a shard's
identity: all engines that pass give the same ids. A race costs up to 3 s, most of it to load the second engine, and a good
choice saves a third of the encoding. So data sets with less than RACE_FROM left to encode use the first engine.
"""

import hashlib
import itertools
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version

import orjson
import pyarrow as pa
from tokenmill.tasks.shards.remembered import remembered
from tokenmill.tasks.storage import user_cache

from .engines import ENGINES
from .exact import exact_encoder
from .gate import Gate
from .settings import Engine

RACE_FROM = 256_000_000
"""Bytes of source left to encode from which a race pays off."""

COURSE = 16_000_000
"""Characters that each engine encodes, as it would at the beginning of a shard: without a warm cache."""

BATCH = 1_000_000
"""Characters per call."""


def fastest_engine(gate: Gate) -> Engine | None:
    """The fastest engine that passes the gate; None if none does."""
    passing: list[Engine] = [engine for engine in ENGINES if gate.difference(engine) is None]
    if len(passing) < len(ENGINES):
        return passing[0] if passing else None
    vocabulary, libraries = gate.vocabulary, [(engine, version(engine)) for engine in ENGINES]
    key = [vocabulary.fingerprint, gate.literal, libraries, platform.node(), platform.machine()]
    place = user_cache("races", f"{hashlib.sha256(orjson.dumps(key)).hexdigest()[:32]}.json")
    seconds = remembered(place, dict[Engine, float], lambda: _race(gate))
    return min(ENGINES, key=seconds.__getitem__)


def _race(gate: Gate) -> dict[Engine, float]:
    """CPU seconds of each engine for the beginning of the data set."""
    course = [pa.array(texts, pa.large_string()) for texts in _course(gate)]
    return {engine: _seconds(gate, engine, course) for engine in ENGINES}


def _seconds(gate: Gate, engine: Engine, course: list[pa.LargeStringArray]) -> float:
    encoder = exact_encoder(gate.vocabulary, engine, literal=gate.literal)
    start = time.process_time()
    for texts in course:
        encoder.encode(texts)
    return time.process_time() - start


def _course(gate: Gate) -> Iterator[list[str]]:
    """Batches of the first texts of a data set."""
    texts = itertools.chain.from_iterable(map(gate.documents, gate.slices))
    batch: list[str] = []
    size = total = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            total += size
            batch, size = [], 0
        if total >= COURSE:
            return
    yield batch
