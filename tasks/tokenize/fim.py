"""Fill in the middle: documents rearranged so that a model learns to write the missing text between two others.

    PSM  [prefix token] prefix [suffix token] suffix [middle token] middle
    SPM  [prefix token] [suffix token] suffix [middle token] prefix middle

Bavarian et al. 2022 (arXiv:2207.14255). Layouts and choices match Megatron's `GPTFIMDataset`: the two cuts are between
any two characters (code points), because a cursor may be there, so each piece is tokenized separately and tokens don't span a
cut. Megatron cuts when it reads a sample, so it must decode the sample and truncate or pad the result. Here the text is at
hand, documents remain whole, and the order of a training run can be planned.

The xxh3_64 of a document's text decides whether it is rearranged, how, and where it is cut. Neither worker nor batch matters.
The pieces of a batch are one Arrow array over the batch's own text, encoded in one call; NumPy puts their ids in order. At a
rate of 0.5, preparing code takes 1.3 times as long.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.blend.models import Fim
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.splitmix import GAMMA, splitmix64

from .documents import digests_of
from .encoders import Encoder, Tokens, utf8_of
from .exact import replaced
from .vocabulary import Vocabulary

KNOWN = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),  # Qwen, CodeGemma, OpenAI's cl100k
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),  # StarCoder, Granite; Megatron's default
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),  # noqa: RUF001 - as DeepSeek writes them
    ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),  # GLM
    ("[PREFIX]", "[MIDDLE]", "[SUFFIX]"),  # Mistral
    ("<PRE>", "<MID>", "<SUF>"),  # the paper
)
"""The prefix, middle and suffix tokens of vocabularies."""

MOST_NAMED = 20
"""Control tokens that an error message lists."""

DRAWS = 4
"""Random numbers per fragment: whether it is rearranged, its layout, and its two cuts. Number 0 decides about the document."""

EDGES, CONTROLS = 4, 3
"""A rearranged fragment adds four edges to its document, and so four pieces: its own three, and the text behind it; and three
control tokens."""

FIRST_LEAD = -64
"""Bytes below it, as int8, are 0x80 to 0xBF: they continue a character in UTF-8."""

FACT, COUNTED = "fim", ("documents", "psm", "spm")
"""The facts in a receipt about rearranged documents, and about fragments (documents, unless these are split) by layout."""

ROLES = ("text", "prefix", "suffix", "middle", "prefix and middle")
TEXT, PREFIX, SUFFIX, MIDDLE, PREFIX_AND_MIDDLE = range(len(ROLES))
"""The parts of a rearranged document."""


@dataclass(frozen=True, slots=True)
class FimRecipe:
    """Every option of `Fim` that can change a byte, and the ids of the prefix, middle and suffix tokens."""

    rate: float
    spm_rate: float
    split_sample: str | None
    fragment_rate: float | None
    no_prefix: str | None
    seed: int
    prefix: int
    middle: int
    suffix: int

    def strings(self, vocabulary: Vocabulary) -> frozenset[str]:
        """Return the control strings for the three tokens."""
        ids = {self.prefix, self.middle, self.suffix}
        return frozenset(string for string, number in vocabulary.controls.items() if number in ids)

    def roles(self, ids: np.ndarray) -> np.ndarray:
        """Return the part of a stored document that each token is in, as an index into ROLES (int8 [tokens]).

        A control token is in the part that it begins. No mark follows the last part, so text behind a fragment counts as its middle.
        """
        marks = np.flatnonzero(np.isin(ids, [self.prefix, self.middle, self.suffix]))
        found, lengths = ids[marks], np.diff(np.concatenate([[0], marks, [len(ids)]]))
        # Only SPM writes the suffix token right behind the prefix token.
        in_spm = (
            (found == self.prefix)
            & (lengths[1:] == 1)
            & (np.append(found[1:], self.prefix) == self.suffix)[: len(marks)]
        )
        begun = np.maximum.accumulate(np.where(found == self.prefix, np.arange(len(marks)), 0))
        middles = np.where(in_spm[begun], PREFIX_AND_MIDDLE, MIDDLE)
        roles = np.select([found == self.middle, (found == self.suffix) | in_spm], [middles, SUFFIX], PREFIX)
        return np.repeat(np.concatenate([[TEXT], roles]), lengths).astype(np.int8)


def fim_recipe(fim: Fim | None, vocabulary: Vocabulary) -> FimRecipe | None:
    """Return the recipe of `fim` with a vocabulary; None if no document is rearranged.

    Raises InputError for tokens that the vocabulary lacks, and for a vocabulary that does not keep the text of pieces.
    """
    if fim is None or not fim.rate:
        return None
    strings = _control_strings(fim, vocabulary)
    # A tokenizer that adds a space before each text, as SentencePiece does, would add one within words.
    pieces = vocabulary.reference(True).encode(pa.array(PIECES_TRIED, pa.large_string()))
    if vocabulary.decode(pieces.ids.tolist()) != "".join(PIECES_TRIED):
        raise InputError(
            "fim: this tokenizer changes the text of a document that is cut in pieces, for example by a space before each; "
            "use a byte-level tokenizer, or set fim.rate=0"
        )
    prefix, middle, suffix = (vocabulary.controls[string] for string in strings)
    chosen = fim.model_dump(exclude={"prefix_token", "middle_token", "suffix_token", "skip_prefix"})
    return FimRecipe(**chosen, no_prefix=fim.skip_prefix, prefix=prefix, middle=middle, suffix=suffix)


PIECES_TRIED = ["def f", "(x, ", "y):\n", "  return", " x"]


def _control_strings(fim: Fim, vocabulary: Vocabulary) -> Sequence[str]:
    """The prefix, middle and suffix token of the settings, or those that the vocabulary has by a known name."""
    controls = vocabulary.controls
    if not fim.prefix_token:
        found = next((strings for strings in KNOWN if controls.keys() >= set(strings)), None)
        if found is not None:
            return found
        some = ", ".join(map(repr, list(controls)[:MOST_NAMED]))
        more = f" and {len(controls) - MOST_NAMED:,} more" if len(controls) > MOST_NAMED else ""
        raise InputError(
            "fim: the tokenizer lacks prefix, middle and suffix tokens with known names; name three of its control tokens in "
            f"fim.prefix_token, fim.middle_token and fim.suffix_token (it has {some or 'none'}{more})"
        )
    given = {name: getattr(fim, name) for name in ("prefix_token", "middle_token", "suffix_token")}
    for name, string in given.items():
        if string not in controls:
            raise InputError(
                f"fim.{name}: the tokenizer doesn't have the control token {string!r}; {nearest(string, controls)}"
            )
    return list(given.values())


@dataclass(frozen=True, slots=True)
class Filled:
    """Encoded documents, and the fragments that were rearranged: document (int64 [fragments]) and layout (True: SPM)."""

    tokens: Tokens
    owners: np.ndarray
    spm: np.ndarray

    @property
    def counts(self) -> dict[str, int]:
        """The number of each of COUNTED."""
        spm = int(np.count_nonzero(self.spm))
        return dict(zip(COUNTED, (len(np.unique(self.owners)), len(self.spm) - spm, spm), strict=True))


class _Fragments(NamedTuple):
    """Fragments in order: document, number in it, and bounds in bytes of the batch (int64 [fragments] each).

    `whole` (bool [fragments]) is True for a document without a separator.
    """

    owners: np.ndarray
    numbers: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    whole: np.ndarray

    def where(self, mask: np.ndarray) -> "_Fragments":
        return _Fragments(*(column[mask] for column in self))


@dataclass(frozen=True, slots=True)
class FimEncoder:
    """Encodes documents, some of them rearranged.

    `reserved` are control strings that text may turn into; documents that contain one remain unchanged, because their pieces
    would be ambiguous. `most` is the most tokens of a document; longer ones, which are cut, remain unchanged.
    """

    encoder: Encoder
    recipe: FimRecipe
    reserved: Collection[str] = ()
    most: int | None = None

    def encode(self, texts: pa.LargeStringArray, eligible: np.ndarray) -> Filled:
        """Return the ids of each text, rearranged only where `eligible` (bool [texts]); `by_reference` counts pieces."""
        bounds, content = utf8_of(texts)
        bounds, content = bounds - bounds[0], content[bounds[0] : bounds[-1]]
        digests = digests_of(texts, self.recipe.seed)
        chosen = eligible & (_uniform(digests, np.zeros(1, np.int64)) < self.recipe.rate)
        if self.reserved:
            options = compute.MatchSubstringOptions("|".join(map(re.escape, self.reserved)))
            matches = compute.call_function("match_substring_regex", [texts], options)
            chosen &= ~matches.to_numpy(zero_copy_only=False)
        fragments = self._fragments(content, bounds, np.flatnonzero(chosen))
        # Every draw has its own number in the document's stream, so none depends on how many came before.
        own, numbers = digests[fragments.owners], 1 + DRAWS * fragments.numbers
        first, layout, *cuts = (_uniform(own, numbers + draw) for draw in range(DRAWS))
        wanted = (fragments.whole | (first < (self.recipe.fragment_rate or 0))) & (fragments.stops > fragments.starts)
        if self.recipe.no_prefix is not None:
            head = np.frombuffer(self.recipe.no_prefix.encode(), np.uint8)
            long = np.flatnonzero(fragments.stops - fragments.starts >= len(head))
            same = (content[fragments.starts[long][:, None] + np.arange(len(head))] == head).all(axis=1)
            wanted[long[same]] = False
        fragments, spm = fragments.where(wanted), layout[wanted] < self.recipe.spm_rate
        edges = _edges(content, fragments, np.stack([cut[wanted] for cut in cuts], axis=1))
        tokens, owners = self._arranged(content, bounds, edges, fragments.owners, spm), fragments.owners
        if self.most is not None:
            # A document that is too long would be cut within its pieces, so it is encoded as it was.
            rows = np.unique(owners)
            rows = rows[tokens.lengths[rows] > self.most]
            if rows.size:
                tokens = replaced(tokens, rows, self.encoder.encode(texts.take(pa.array(rows))))
                kept = ~np.isin(owners, rows)
                owners, spm = owners[kept], spm[kept]
        return Filled(tokens, owners, spm)

    def _fragments(self, content: np.ndarray, bounds: np.ndarray, rows: np.ndarray) -> _Fragments:
        """The fragments of the documents `rows`."""
        if self.recipe.split_sample is None:
            whole = np.ones(len(rows), np.bool_)
            return _Fragments(rows, np.zeros(len(rows), np.int64), bounds[rows], bounds[rows + 1], whole)
        separator, text = re.compile(re.escape(self.recipe.split_sample.encode())), content.tobytes()
        found: list[tuple[int, int, int, int, bool]] = []
        for row, start, stop in zip(rows.tolist(), bounds[rows].tolist(), bounds[rows + 1].tolist(), strict=True):
            spans = [match.span() for match in separator.finditer(text, start, stop)]
            starts, stops = [start, *(end for _, end in spans)], [*(begin for begin, _ in spans), stop]
            found += [(row, number, *each, not spans) for number, each in enumerate(zip(starts, stops, strict=True))]
        owners, numbers, starts, stops, whole = np.array(found, np.int64).reshape(-1, 5).T
        return _Fragments(owners, numbers, starts, stops, whole.astype(np.bool_))

    def _arranged(
        self, content: np.ndarray, bounds: np.ndarray, edges: np.ndarray, owners: np.ndarray, spm: np.ndarray
    ) -> Tokens:
        """Encode all pieces, and put each fragment's pieces into the order of its layout."""
        # Documents and pieces, end to end, are the batch's own text.
        ends = np.insert(bounds, np.repeat(owners + 1, EDGES), edges.ravel())
        texts = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), pa.py_buffer(content))
        pieces = self.encoder.encode(texts)
        count = len(pieces.lengths)
        # The numbers of pieces in storage order. Those of control tokens follow the last piece.
        prefixes = owners + 1 + EDGES * np.arange(len(owners))
        opening, filling, closing = (np.full(len(prefixes), count + control) for control in range(CONTROLS))
        middles, suffixes = prefixes + 1, prefixes + 2
        as_psm = np.stack([opening, prefixes, closing, suffixes, filling, middles], axis=1)
        as_spm = np.stack([opening, closing, suffixes, filling, prefixes, middles], axis=1)
        rest = np.delete(np.arange(count), np.stack([prefixes, middles, suffixes]).ravel())
        moved = prefixes - 3 * np.arange(len(prefixes))
        order = np.insert(rest, np.repeat(moved, 6), np.where(spm[:, None], as_spm, as_psm).ravel())
        # The pieces of each document, of which there is one if nothing was rearranged.
        counts = 1 + (EDGES + CONTROLS) * np.bincount(owners, minlength=len(bounds) - 1)
        is_control = order >= count
        lengths = np.append(pieces.lengths, np.ones(CONTROLS, np.int64))[order]
        starts = np.append(pieces.offsets[:-1], np.zeros(CONTROLS, np.int64))[order]
        stops = _ends(lengths)
        # Each id comes from its piece's beginning, as far behind it as it is behind the piece's new one.
        ids = pieces.ids[np.repeat(starts - stops[:-1], lengths) + np.arange(stops[-1])]
        controls = np.array([self.recipe.prefix, self.recipe.middle, self.recipe.suffix], np.uint32)
        ids[stops[:-1][is_control]] = controls[order[is_control] - count]
        return Tokens(ids, stops[_ends(counts)], pieces.by_reference)


def _uniform(digests: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1): number `numbers` of the stream of SplitMix64 that each hash begins."""
    return (splitmix64(digests + numbers.astype(np.uint64) * GAMMA) >> np.uint64(11)) * 2.0**-53


def _edges(content: np.ndarray, fragments: _Fragments, draws: np.ndarray) -> np.ndarray:
    """Where each fragment begins, is cut twice, and ends, in bytes, int64 [fragments, 4].

    Each cut is uniform over the places before, between and behind the characters. Bytes are counted as characters but for those that
    continue one (RFC 3629), which are few in code.
    """
    continuing = np.flatnonzero(content.view(np.int8) < FIRST_LEAD)
    first, last = (places - np.searchsorted(continuing, places) for places in (fragments.starts, fragments.stops))
    cuts = first[:, None] + (draws * (last - first + 1)[:, None]).astype(np.int64)
    before = np.searchsorted(continuing - np.arange(len(continuing)), cuts, side="right")
    return np.column_stack([fragments.starts, np.sort(cuts + before, axis=1), fragments.stops])


def _ends(lengths: np.ndarray) -> np.ndarray:
    """Where each of so many begins and the last ends, int64 [lengths + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def fim_lines(manifest: Manifest) -> Iterator[str]:
    """Yield a line about each dataset of a manifest with rearranged documents."""
    found: dict[str, Counter[str]] = {}
    for entry in manifest["shards"]:
        if FACT in entry.get("facts", {}):
            name = f"{entry['split']}/{entry['dataset']}".removeprefix("datasets/")
            found.setdefault(name, Counter()).update(entry["facts"][FACT])
    for name, counts in found.items():
        yield (
            f"{name}: {counted(counts['documents'], 'document')} rearranged to fill in the middle, "
            f"{counts['psm']:,} as PSM and {counts['spm']:,} as SPM"
        )
