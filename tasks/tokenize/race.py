"""Which engine encodes a dataset fastest, of those that the gate trusts: they encode the same texts, and the faster one wins.

It depends on the vocabulary, the processor and the size of the dataset, because engines take 0.3 to 3 s to load. Speeds are
cached per user and machine and are part of no shard's identity: all engines that pass the gate give the same ids. A race costs
up to 5 s, once, and a good choice saves a third of the encoding. So datasets with less than RACE_FROM left to encode use the
first engine.
"""

import hashlib
import itertools
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Speed:
    """CPU seconds that an engine takes to load a vocabulary, and to encode a byte."""

    load: float
    encode: float

    def seconds(self, size: int) -> float:
        """CPU seconds for `size` bytes of source."""
        return self.load + self.encode * size


def fastest_engine(gate: Gate, size: int) -> Engine | None:
    """The fastest engine for `size` bytes of source, of those that pass the gate; None if none does."""
    vocabulary, libraries = gate.vocabulary, [(engine, version(engine)) for engine in ENGINES]
    key = [vocabulary.fingerprint, gate.literal, libraries, platform.node(), platform.machine(), COURSE]
    place = user_cache("races", f"{hashlib.sha256(orjson.dumps(key)).hexdigest()[:32]}.json")
    speeds = remembered(place, dict[Engine, Speed], lambda: _race(gate))
    by_time = sorted(speeds, key=lambda engine: speeds[engine].seconds(size))
    return next((engine for engine in by_time if gate.difference(engine) is None), None)


def _race(gate: Gate) -> dict[Engine, Speed]:
    """The speeds of the engines that support the vocabulary, on the beginning of the dataset."""
    course = [pa.array(texts, pa.large_string()) for texts in _course(gate)]
    speeds: dict[Engine, Speed] = {}
    for engine in ENGINES:
        with suppress(ValueError):  # for a vocabulary that the engine does not support
            speeds[engine] = _speed(gate, engine, course)
    return speeds


def _speed(gate: Gate, engine: Engine, course: list[pa.LargeStringArray]) -> Speed:
    start = time.process_time()
    gate.vocabulary.fast(engine, gate.literal)
    loaded = time.process_time()
    encoder = exact_encoder(gate.vocabulary, engine, literal=gate.literal)
    begun = time.process_time()
    for texts in course:
        encoder.encode(texts)
    return Speed(loaded - start, (time.process_time() - begun) / max(sum(texts.nbytes for texts in course), 1))


def _course(gate: Gate) -> Iterator[list[str]]:
    """Batches of the first texts of a dataset."""
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
