"""Phases: which documents of which prefixes a phase of training reads.

    OUT/phases/main.json                         Megatron's blend of a phase
    OUT/phases/main/data_00000_1a2b3c4d.bin/.idx   a range of the documents in a prefix

The documents of a dataset are in a line, prefix after prefix. If the phases together read less than the line, they divide the
line in proportion, and each draws from its own part at random. Otherwise phase after phase takes its tokens from the line, so
that a document occurs twice only after all have occurred once; then the line starts again. A phase that needs a dataset several times
over reads whole prefixes that often, and the rest from the line.

A range of a prefix is a separate index over the same tokens: its `.idx` lists only these documents, 20 bytes each, and its
`.bin` is a link to the prefix's (a copy on an object store). So a changed budget doesn't tokenize again. Ranges end between
documents, half a document from where they should at most. If a dataset is sorted, so are its phases: shuffle its rows before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
from tokenmill.tasks.blend.mix import Mix, PhaseMix
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.plan import Finished
from tokenmill.tasks.shards.publication import described
from tokenmill.tasks.shards.publish import Output, place_files, publish, publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import join
from xxhash import xxh3_64_hexdigest

from .binidx import Index, read_index, write_index

FOLDER = "phases"

ALMOST = 1e-6
"""Parts of a dataset below this count as 0."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A published prefix of training data; `tokens_file` is the record of its `.bin`."""

    dataset: str
    path: str
    key: str
    part: str
    documents: int
    tokens: int
    tokens_file: Output

    @classmethod
    def of(cls, item: Finished, part: str, path: str) -> "Pair":
        count = item.receipt.parts[part]
        (tokens_file,) = (output for output in item.receipt.outputs if output.path == f"{part}.bin")
        return cls(item.shard.dataset, path, item.key, part, count.documents, count.tokens, tokens_file)

    @property
    def index(self) -> Index:
        """Its index. The latest few are kept, because a dataset's phases are cut one by one."""
        return _index(f"{self.path}.idx", self.tokens_file.size)


@lru_cache(maxsize=4)
def _index(place: str, size: int) -> Index:
    return read_index(read_bytes(place) or b"", size)


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive documents of a prefix, from number `first` on, and how many of their tokens to read."""

    pair: Pair
    first: int
    documents: int
    tokens: int
    drawn: float

    @property
    def is_whole(self) -> bool:
        """Whether these are all documents of the prefix."""
        return self.documents == self.pair.documents


def cut_phases(pairs: Sequence[Pair], mix: Mix) -> list[list[Range]]:
    """Return the ranges that each phase reads. Raises InputError for a dataset with too few documents to be divided."""
    phases: list[list[Range]] = [[] for _ in mix.phases]
    for name in dict.fromkeys(pair.dataset for pair in pairs):
        own, at = [pair for pair in pairs if pair.dataset == name], 0.0
        # A single phase takes whole prefixes, and the trainer draws from all of them at random.
        if len(mix.phases) == 1:
            phases[0] += _whole_epochs(own, mix.drawn(name) / sum(pair.tokens for pair in own))
            continue
        # Above 1 if the phases read less than there is: then each gets that much more to draw from.
        spare = max(1.0, sum(pair.tokens for pair in own) / max(mix.drawn(name), 1.0))
        for number, phase in enumerate(mix.phases):
            ranges, at = _take_span(own, phase, at, spare)
            phases[number] += ranges
    return phases


def _whole_epochs(pairs: Sequence[Pair], times: float) -> list[Range]:
    """All documents, read so many times."""
    return [Range(pair, 0, pair.documents, pair.tokens, times * pair.tokens) for pair in pairs if times]


def _take_span(pairs: Sequence[Pair], phase: PhaseMix, at: float, spare: float) -> tuple[list[Range], float]:
    """The ranges of a dataset for a phase, taken from token `at` of its line on, and where the next phase begins.

    Ranges contain `spare` times the phase's draws from them.
    """
    held, drawn = sum(pair.tokens for pair in pairs), phase.drawn.get(pairs[0].dataset, 0.0)
    times, rest = divmod(drawn * spare, held)
    # Floating-point sums of shares that make a whole may miss it slightly.
    if rest > held * (1 - ALMOST):
        times, rest = times + 1, 0.0
    found = _whole_epochs(pairs, times / spare)
    if rest <= held * ALMOST:
        return found, at
    end = at + rest
    # The second part is what goes beyond the end of the line, from its beginning on.
    line = [
        replace(each, drawn=each.tokens / spare)
        for part in ((at, min(end, held)), (0.0, end - held))
        for each in _between(pairs, *part)
    ]
    if not line and found:
        return found, at  # the rest is below half a document, so whole epochs are closest to the budget
    if not line:
        raise InputError(
            f"phase {phase.name!r}: {rest:,.0f} tokens of {pairs[0].dataset!r} are less than half a document; give it more "
            "tokens in this phase, or none"
        )
    return [*found, *line], end % held


def _between(pairs: Sequence[Pair], begin: float, end: float) -> Iterator[Range]:
    """The documents between two places of the line, in tokens."""
    start = 0
    for pair in pairs:
        first, stop = (_document_at(pair, place - start) for place in (begin, end))
        if stop > first:
            lengths = pair.index.lengths[first:stop]
            tokens = int(lengths.sum(dtype=np.int64))
            if tokens:
                yield Range(pair, first, stop - first, tokens, tokens)
        start += pair.tokens


def _document_at(pair: Pair, place: float) -> int:
    """The number of the document that begins closest to a place, in tokens from the beginning of a prefix."""
    if place <= 0:
        return 0
    if place >= pair.tokens:
        return pair.documents
    ends = np.cumsum(pair.index.lengths, dtype=np.int64)
    number = int(np.searchsorted(ends, place))
    start = int(ends[number - 1]) if number else 0
    return number + (int(ends[number]) - place < place - start)


def publish_phases(
    output_dir: str, phases: Sequence[Sequence[Range]], mix: Mix, blend: bytes
) -> tuple[Mapping[str, Any], list[Output]]:
    """Write the blend of each phase, and the ranges that it reads; `blend` is blend.json, for the other splits.

    Returns the manifest's entry of phases, and their files.
    """
    records: list[Mapping[str, Any]] = []
    files: list[Output] = []
    for phase, ranges in zip(mix.phases, phases, strict=True):
        placed = [_place(output_dir, phase.name, number, each) for number, each in enumerate(ranges)]
        path = f"{FOLDER}/{phase.name}.json"
        listed = [word for each, (name, _) in zip(ranges, placed, strict=True) for word in (repr(each.drawn), name)]
        content = orjson.dumps({**orjson.loads(blend), "train": listed}, option=orjson.OPT_INDENT_2)
        publish_bytes(join(output_dir, path), content)
        files += [described(path, content), *(file for _, written in placed for file in written)]
        pairs = [
            {
                "dataset": each.pair.dataset, "key": each.pair.key, "part": each.pair.part, "held": each.pair.tokens,
                "path": name.removeprefix(f"{output_dir}/"), "of": each.pair.path.removeprefix(f"{output_dir}/"),
                "first": each.first, "documents": each.documents, "tokens": each.tokens, "drawn": each.drawn,
            }
            for each, (name, _) in zip(ranges, placed, strict=True)
        ]  # fmt: skip
        records.append({"name": phase.name, "drawn": dict(phase.drawn), "blend": path, "pairs": pairs})
    return {"phases": records}, files


def _place(output_dir: str, phase: str, number: int, found: Range) -> tuple[str, list[Output]]:
    """The name of a range, and its files; a whole prefix has its own already."""
    pair = found.pair
    if found.is_whole:
        return pair.path, []
    content = f"{pair.key} {pair.part} {found.first} {found.documents}"
    path = f"{FOLDER}/{phase}/data_{number:05d}_{xxh3_64_hexdigest(content.encode())[:8]}"
    name = join(output_dir, path)
    place_files([(f"{pair.path}.bin", f"{name}.bin")])
    lengths = pair.index.lengths
    # Offsets are those in the prefix, whose tokens the range shares.
    start = int(lengths[: found.first].sum(dtype=np.int64))
    mine = lengths[found.first : found.first + found.documents]
    with publish(f"{name}.idx") as stream:
        write_index(stream.write, lambda: [mine], len(mine), pair.index.dtype, start)
    return name, [replace(pair.tokens_file, path=f"{path}.bin"), replace(stream.output, path=f"{path}.idx")]
