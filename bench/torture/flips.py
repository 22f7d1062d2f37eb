"""One flipped bit at a time, in everything that is kept, against what was there before.

A preparation of each kind is made in this process, then one random bit of one of its files is flipped, and

* `verify` must report it, in whatever is published or proven by the manifest;
* a repeated preparation must end with the bytes of the first or with an error that says what to do. Some receipts are
  removed beforehand, so that it reads back what the steps before wrote: every time for a file that the manifest does not
  name (rounds of deduplication, hashes of sources, verdicts of the gate), one time in twenty for those that it does.
  There it may also end with the flipped bit itself, if `verify` still reports it: a receipt vouches for sizes.

Sources with checksums must be refused or read as before; of plain JSON Lines only the rows around the bit may change.
What the user's cache holds must be found again and replaced.

The judge knows no format: it has the bytes of the undisturbed preparation and of the sources, and `json` for rows.
"""

import gzip
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup import decisions
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.vocabulary import ensure_vocabulary
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.slices import ContentIndex, cut
from tokenmill.tasks.storage import user_cache
from tokenmill.tasks.tokenize import load
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings

from bench.torture.processes import each
from tests import preparing, preparing_dedup, preparing_harmony, preparing_rl, preparing_sft
from tests.preparing import blend_of, tree, write_lines
from tests.preparing_rl import write_rows

COUNT = 10_000

BATCH = 250
"""Flips in the same preparations."""

RERUN_ONE_IN = 20
"""How often a preparation is repeated over a flip that `verify` must report."""

SOURCES_ONE_IN, CACHES_ONE_IN, BETWEEN_ONE_IN = 10, 250, 6
"""How many of the flips are in sources, in the user's cache, and between the steps of a preparation, which must be repeated
for each of these; the others are in what its manifest vouches for.
"""

ATTEMPTS = 10
"""A repeated preparation may say this often that something is damaged and to be built anew."""

LONG_AGO = (1_000_000_000, 1_000_000_000)
"""Sources are this old, so that their hashes are remembered."""

REFUSED, NO_EFFECT = "refused", "of no effect"


@dataclass
class Tally:
    """What became of some flips, and the names of the files that were hit."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    files: set[str] = field(default_factory=set[str])

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.outcomes + other.outcomes, self.files | other.files)


def run(count: int, seed: int) -> str:
    """Flip `count` bits. Raises AssertionError at the first that is believed."""
    cases = [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
    tally = sum(each(partial(flip_each, seed), cases), Tally())
    outcomes = ", ".join(f"{tally.outcomes[outcome]:,} {outcome}" for outcome in (REFUSED, NO_EFFECT))
    return f"{count:,} flips in {len(tally.files):,} files of {len(KINDS)} preparations, sources and caches: {outcomes}"


def flip_each(seed: int, cases: Sequence[int]) -> Tally:
    """Flip a bit for each of the numbered cases. Raises AssertionError with seed, case, file and bit."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, own_caches(Path(folder, "cache")):
        subjects = Subjects(Path(folder))
        for case in cases:
            source = random.Random(f"{seed}-{case}")
            subject = subjects.draw(source)
            file = subject.draw(source)
            bit = source.randrange(8 * file.stat().st_size)
            name = str(file.relative_to(folder))
            try:
                tally.outcomes[subject.judge(file, bit, source)] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, case {case}: bit {bit} of {name}: {error!r}") from error
            tally.files.add(name)
    return tally


@contextmanager
def own_caches(folder: Path) -> Iterator[None]:
    """A user's cache of its own, and afterwards nothing of it in the environment."""
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}):
        os.environ.pop("TIKTOKEN_CACHE_DIR", None)
        os.environ.pop("TIKTOKEN_ENCODINGS_BASE", None)
        yield


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """A file with one bit flipped where it lies, so that its hard links change as well; put back if it is still there."""
    whole, times = file.read_bytes(), file.stat()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    _overwrite(file, damaged)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    yield
    if not file.exists() or file.read_bytes() == damaged:
        file.parent.mkdir(parents=True, exist_ok=True)
        _overwrite(file, whole)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _overwrite(file: Path, content: bytes) -> None:
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(content)


class Subjects:
    """What bits are flipped in; each is made when it is first drawn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(self, source: random.Random) -> "Preparation | Sources | Caches":
        """One of them."""
        if not source.randrange(CACHES_ONE_IN):
            return self.caches
        if not source.randrange(SOURCES_ONE_IN):
            return self.sources
        return source.choice(self.preparations)

    @cached_property
    def preparations(self) -> "list[Preparation]":
        """One of each kind."""
        return [Preparation(self.folder / kind, make(self.folder)) for kind, make in KINDS.items()]

    @cached_property
    def sources(self) -> "Sources":
        """The same rows in several formats."""
        return Sources(self.folder / "sources")

    @cached_property
    def caches(self) -> "Caches":
        """The user's."""
        return Caches()


class Preparation:
    """A preparation that was published once, undisturbed; `prepare` repeats it in the same folder."""

    def __init__(self, out: Path, prepare: Callable[[Path], object]) -> None:
        self.out = out
        self.prepare = partial(prepare, out)
        self.prepare()
        self.expected = tree(out)
        self.keys = _keys_in(out / "manifest.json")
        files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.stat().st_size]
        self.vouched = [path for path in files if self.is_vouched(str(path.relative_to(out)))]
        self.between = sorted(set(files) - set(self.vouched))

    def draw(self, source: random.Random) -> Path:
        """A file that holds something."""
        return source.choice(self.vouched if source.randrange(BETWEEN_ONE_IN) else self.between)

    def judge(self, file: Path, bit: int, source: random.Random) -> str:
        """What becomes of a flip. Raises AssertionError when it is believed."""
        if file in self.between:
            return self.judge_unvouched(file, bit, source)
        with flipped(file, bit), self.receipts_kept():
            repeat = not source.randrange(RERUN_ONE_IN)
            verified = not repeat or source.randrange(2)
            if verified:
                assert self.reports(), "verify is content"
            if repeat:
                self.finish(file, source, withdraw=not verified)
                assert self.differing() == [] or (not verified and self.reports()), (
                    f"done with other {self.differing()}"
                )
        self.restore()
        return REFUSED

    def judge_unvouched(self, file: Path, bit: int, source: random.Random) -> str:
        """What becomes of a flip in a file that the manifest does not name: a repeated preparation publishes the same."""
        with self.receipts_kept():
            with flipped(file, bit):
                complaints = self.finish(file, source, withdraw=True)
            assert self.differing() == [], f"done with other {self.differing()}"
        self.restore()
        return REFUSED if complaints else NO_EFFECT

    def is_vouched(self, name: str) -> bool:
        """Whether the manifest vouches for a file: all but what planning remembers and what lies between the steps."""
        parts = name.split("/")
        return parts[0] != "shards" or (len(parts) > 3 and parts[2] in self.keys)

    def published(self) -> Mapping[str, bytes]:
        """What the manifest vouches for, as it is now."""
        return {name: content for name, content in tree(self.out).items() if self.is_vouched(name)}

    @cached_property
    def whole(self) -> Mapping[str, bytes]:
        """What the manifest vouched for at first."""
        return {name: content for name, content in self.expected.items() if self.is_vouched(name)}

    def reports(self) -> bool:
        """Whether `verify` has anything to say."""
        try:
            return bool(verify(str(self.out), inspector_of(str(self.out))).problems)
        except (InputError, RunError):
            return True

    def differing(self) -> list[str]:
        """The names of published files that are not what they were."""
        found = self.published()
        return sorted(name for name in found.keys() | self.whole.keys() if found.get(name) != self.whole.get(name))

    def finish(self, file: Path, source: random.Random, *, withdraw: bool) -> list[str]:
        """Repeat the preparation until it is done; what it complained of before."""
        if withdraw:
            self.withdraw_some(file, source)
        complaints: list[str] = []
        while len(complaints) < ATTEMPTS:
            decisions._digests.cache_clear()  # noqa: SLF001 - a process of its own knows nothing yet
            try:
                self.prepare()
            except (InputError, RunError) as error:
                complaints.append(str(error))
            else:
                return complaints
        raise AssertionError(f"refused again and again: {complaints[-1]}")

    def withdraw_some(self, file: Path, source: random.Random) -> None:
        """Remove every other receipt, but not the one beside `file`."""
        for receipt in sorted(self.out.glob("shards/*/*/receipt.json")):
            if source.randrange(2) and receipt.parent != file.parent:
                receipt.unlink()

    @contextmanager
    def receipts_kept(self) -> Iterator[None]:
        """Receipts that are missing afterwards are put back."""
        receipts = {path: path.read_bytes() for path in self.out.glob("shards/*/*/receipt.json")}
        yield
        for path, content in receipts.items():
            if not path.exists():
                path.write_bytes(content)

    def restore(self) -> None:
        """Repeat the preparation without flips. Raises AssertionError unless all of it is what it was."""
        if tree(self.out) == self.expected:
            return
        self.prepare()
        assert self.published() == self.whole, f"not mended: {self.differing()}"
        assert not self.reports(), "not mended"


def _keys_in(manifest: Path) -> set[str]:
    """The keys of the shards that a manifest names."""
    fields = json.loads(manifest.read_bytes())
    return {entry["key"] for entry in [*fields["shards"], *fields.get("derived", {}).get("shards", [])]}


TEXTS = [f"document {number} of rye, " + "grain " * (number % 7) + f"w{number}" * 5 for number in range(60)]
CHATS = [
    {"messages": [
        {"role": "user", "content": f"What is {number} times {number}, in sacks?"},
        {"role": "assistant", "content": f"{number**2}, so " + "to speak, " * (number % 5), "reasoning_content": "Hm."},
    ]}
    for number in range(24)
]  # fmt: skip
BROKEN = b'{"text": "unfinished'


def _texts(folder: Path) -> dict[str, object]:
    """Two files of texts, with duplicates and a broken row."""
    rye = _aged(write_lines(folder / "data/rye.jsonl", [*TEXTS, BROKEN, TEXTS[5]]))
    return blend_of(rye, _aged(write_lines(folder / "data/oats.jsonl", [*TEXTS[:9], "oats " * 9])))


def _chats(folder: Path) -> dict[str, object]:
    return blend_of(_aged(write_rows(folder / "data/chats.jsonl", [*CHATS, b"broken", CHATS[3]])))


def _aged(path: Path) -> Path:
    os.utime(path, LONG_AGO)
    return path


def vocabulary(folder: Path) -> Path:
    """A small vocabulary whose pre-tokenizer the fast engine refuses, so that no sweep of characters is needed."""
    place = folder / "vocabulary"
    if not place.exists():
        definition = preparing_sft.chat_vocabulary(place) / "tokenizer.json"
        fields = json.loads(definition.read_bytes())
        digits = {"type": "Digits", "individual_digits": True}
        fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, fields["pre_tokenizer"]]}
        definition.write_text(json.dumps(fields))
    return place


def _pretrain(folder: Path) -> Callable[[Path], object]:
    settings = {
        "shard_size": 2_000,
        "tokenizer": {"model": str(vocabulary(folder))},
        "holdout": {"valid": 0.2, "test": 0.1},
    }
    return partial(preparing.prepare, _texts(folder), **settings)


def _sft(folder: Path) -> Callable[[Path], object]:
    settings = {
        "tokenizer": {"model": str(vocabulary(folder))},
        "pack_size": 128,
        "sampling": "down",
        "shard_size": 2_000,
    }
    blend = _chats(folder)
    blend["datasets"][0]["weight"] = 0.7
    return partial(preparing_sft.prepare, blend, **settings)


def _rl(folder: Path) -> Callable[[Path], object]:
    rows = [
        {"question": f"What is {number} + 1?", "answer": str(number + 1), "table": number % 9} for number in range(40)
    ]
    path = _aged(write_rows(folder / "data/sums.jsonl", [*rows, b"broken"]))
    return partial(preparing_rl.prepare, blend_of(path), shard_size=1_000, holdout={"valid": 0.2, "test": 0.1})


def _harmony(folder: Path) -> Callable[[Path], object]:
    return partial(preparing_harmony.prepare, _chats(folder), shard_size=3_000, dedup={"cap": 1})


def _dedup(folder: Path) -> Callable[[Path], object]:
    return partial(preparing_dedup.prepare, _texts(folder), shard_size=2_000)


KINDS: Mapping[str, Callable[[Path], Callable[[Path], object]]] = {
    "pretrain": _pretrain, "sft": _sft, "rl": _rl, "harmony": _harmony, "dedup": _dedup
}  # fmt: skip
"""How each kind is made ready in a folder: what then prepares it in an output folder."""


class Sources:
    """The same texts in files of several formats."""

    def __init__(self, folder: Path) -> None:
        self.lines = [json.dumps({"text": text}).encode() for text in TEXTS]
        content = b"".join(line + b"\n" for line in self.lines)
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(content)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
        (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(content))
        for codec in ("none", "zstd"):
            table, place = pa.table({"text": TEXTS}), folder / f"{codec}.parquet"
            pq.write_table(table, place, compression=codec, row_group_size=20, write_page_checksum=True)
        self._files = sorted(folder.iterdir())

    def draw(self, source: random.Random) -> Path:
        """A file of any format."""
        return source.choice(self._files)

    def judge(self, file: Path, bit: int, source: random.Random) -> str:
        """What becomes of a flip. Raises AssertionError for rows that are read, and are not what they were."""
        with flipped(file, bit):
            expected = self.untouched(bit) if file.suffix == ".jsonl" else (TEXTS, [])
            try:
                texts, bad = read_all(file)
            except (InputError, RunError):
                return REFUSED
        if texts == TEXTS and not bad:
            return NO_EFFECT
        before, behind = expected
        assert file.suffix == ".jsonl", f"read as {_first_other(texts)}"
        assert texts[: len(before)] == before, f"read as {_first_other(texts)}"
        assert texts[len(texts) - len(behind) :] == behind, f"read as {_first_other(texts)}"
        return REFUSED

    def untouched(self, bit: int) -> tuple[list[str], list[str]]:
        """The texts of the lines before and behind the one of a bit, and the next, which a line end is between."""
        ends = [0]
        for line in self.lines:
            ends.append(ends[-1] + len(line) + 1)
        line = next(number for number in range(len(TEXTS)) if bit // 8 < ends[number + 1])
        return TEXTS[:line], TEXTS[line + 2 :]


def read_all(file: Path) -> tuple[list[str], list[str]]:
    """The texts of a source as a preparation reads them, and what is wrong with each of its bad rows."""
    (found,) = discover(DataSource(name="a", path=str(file)))
    slices = ContentIndex().identify(cut(found, 2_000, ["text"]), ["text"], "content")
    texts: list[str] = []
    bad: list[str] = []
    for batch in (batch for part in slices for batch in read_texts(part, "text")):
        texts += batch.texts.to_pylist()
        bad += [row.reason for row in batch.bad]
    return texts, bad


def _first_other(texts: Sequence[str]) -> str:
    different = [text for text, other in zip(texts, TEXTS, strict=False) if text != other]
    return f"{len(texts)} rows, the first other {different[:1]}"


class Caches:
    """What the user's cache holds after vocabularies were loaded."""

    def __init__(self) -> None:
        self.known = _known_of_vocabulary()
        self._files = sorted(path for path in Path(user_cache()).rglob("*") if path.is_file())

    def draw(self, source: random.Random) -> Path:
        """Any of its files."""
        return source.choice(self._files)

    def judge(self, file: Path, bit: int, source: random.Random) -> str:
        """What becomes of a flip. Raises AssertionError unless the same is known as before, and the file is whole again."""
        whole = file.read_bytes()
        with flipped(file, bit):
            assert _known_of_vocabulary() == self.known
            assert file.read_bytes() == whole, "not replaced"
        return NO_EFFECT


def _known_of_vocabulary() -> tuple[object, ...]:
    """What is known of the default vocabulary by a process that has not asked before: a sweep, if it has to ask again."""
    load._load.cache_clear()  # noqa: SLF001
    exact_encoder.cache_clear()
    ensure_vocabulary()
    found = load_vocabulary(TokenizerSettings())
    suspects = exact_encoder(found, "gigatoken", literal=True).suspects
    return found.fingerprint, found.size, found.eos, dict(found.controls), list(suspects)
