"""The story of a source row: the result of each preparation, from the original file to an output folder.

A row is named by its file and line (the row for Parquet and JSON arrays), or by the id of a document made of it. If files of
the blend were published by an earlier preparation, such as `tokenmill dedup` or `harmony`, the row is followed through that as
well, in both directions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenmill.tasks.dataset.dataset import Dataset, open_dataset, require_followed
from tokenmill.tasks.dataset.duplicates import source_rows
from tokenmill.tasks.dataset.fates import Fate, Read, fate_of
from tokenmill.tasks.dataset.parts import DocumentId
from tokenmill.tasks.errors import InputError, RunError, closest
from tokenmill.tasks.kit.parts import counted, visible_line
from tokenmill.tasks.storage import absolute

Story = list[Fate]  # the fates of a row in all preparations that it went through, the first to the last
DEEPEST = 4  # at most so many folders lie between a published file and its manifest
MOST_SHOWN = 8
MOST_STEPS = 20


class UnknownFileError(InputError):
    """A file that no preparation read."""


def why_row(output_dir: str, row: str, option: str = "--row") -> list[Story]:
    """Return the stories of the row `FILE:LINE`, one for every time that it is read; `option` is the one that named it.

    Raises InputError for a folder, file or line that is unknown here, RunError for missing or damaged shards.
    """
    name, _, line = row.rpartition(":")
    if not name or not line.isdecimal() or not int(line):
        raise InputError(f"{option}: {row!r} is not FILE:LINE; lines count from 1, for example data/a.jsonl:17")
    return Follower(output_dir).of_row(name, int(line), option)


def why_document(output_dir: str, document: str) -> list[Story]:
    """Return the stories of the row that a document was made of. Raises as `why_row`, and InputError for an unknown id."""
    return Follower(output_dir).of_document(document)


class Follower:
    """Follows rows through an output and the outputs that it was made from, each opened once."""

    def __init__(self, output_dir: str) -> None:
        self._output = require_followed(open_dataset(output_dir))
        # By folder: what was opened, and what published the files in it, None if nothing did
        self._opened: dict[str, Dataset] = {}
        self._publishers: dict[str, Dataset | None] = {}

    def of_row(self, name: str, line: int, option: str) -> list[Story]:
        file = _file_called(name, sorted(self._files(self._output)), option)
        stories = list(self._stories(self._output, file, line))
        if not stories:
            rows = self._rows(self._output, file)
            raise InputError(f"{option}: {file} has only {counted(rows, 'row')}, so line {line:,} doesn't exist")
        return stories

    def of_document(self, document: str) -> list[Story]:
        wanted, output = DocumentId.parse(document), self._output
        shards = [shard for shard, entry in enumerate(output.entries) if entry["key"].startswith(wanted.key)]
        keys = sorted({output.entries[shard]["key"] for shard in shards})
        if len(keys) != 1:
            found = (
                f"{len(keys)} shards match ({', '.join(keys)}); write more of the key" if keys else "no shard matches"
            )
            raise InputError(f"--doc: {document!r}: {found}")
        entry, row = output.entries[shards[0]], wanted.number
        if wanted.part is not None:
            documents = entry["documents"].get(wanted.part, 0)
            row = output.source_row(shards[0], wanted.part, row) if row < documents else entry["rows"]
        if row >= entry["rows"]:
            raise InputError(
                f"--doc: {document!r}: shard {entry['key']} doesn't have this document; it has {counted(entry['rows'], 'row')} and "
                f"{counted(sum(entry['documents'].values()), 'document')}"
            )
        return [story for shard in shards for story in self._from_origin(output, shard, row)]

    def origin(self, file: str, line: int) -> tuple[str, int]:
        """Return the original file and line of a line that a preparation published; the same for other files."""
        source = self._publisher(file)
        found = source and _read_back(source, file, line - 1)
        if not source or not found:
            return file, line
        shard, row = found
        before, number = source.source(shard, row)
        return self.origin(before.file, number)

    def _files(self, output: Dataset) -> set[str]:
        """The files that an output was made from, directly or not."""
        return set(output.source_files).union(*(self._files(each) for each in self._sources(output)))

    def _rows(self, output: Dataset, file: str) -> int:
        """The number of rows in a file that were read."""
        return max([output.rows_of(file), *(self._rows(source, file) for source in self._sources(output))])

    def _sources(self, output: Dataset) -> list[Dataset]:
        """The preparations whose published files an output was made from."""
        found = [self._publisher(file) for file in output.source_files]
        return list(dict.fromkeys(each for each in found if each is not None))

    def _publisher(self, file: str) -> Dataset | None:
        """The preparation that published a file, if any."""
        folder = file.rpartition("/")[0]
        if folder not in self._publishers:
            self._publishers[folder] = self._found_above(folder)
        return self._publishers[folder]

    def _found_above(self, folder: str) -> Dataset | None:
        for _ in range(DEEPEST):
            if folder in self._opened:
                return self._opened[folder]
            with suppress(InputError, RunError):  # no output, or another program's manifest.json
                return self._opened.setdefault(folder, require_followed(open_dataset(folder)))
            folder = folder.rpartition("/")[0]
            if not folder.strip("/") or folder.endswith(":/"):
                break
        return None

    def _stories(self, output: Dataset, file: str, line: int) -> Iterator[Story]:
        """The stories of a line in a file that an output was made from."""
        for shard, row in output.rows_at(file, line):
            yield from self._from_origin(output, shard, row)
        if file in output.source_files:  # it isn't a file that an earlier preparation read
            return
        for source in self._sources(output):
            for story in self._stories(source, file, line):
                # A story that ends in `source`, continued in `output` as often as that read the row
                fates = [
                    fate_of(output, *found)
                    for name, number in _published(source, story[-1])
                    for found in output.rows_at(name, number + 1)
                ]
                yield from ([*story, fate] for fate in fates)
                if not fates:
                    yield story

    def _from_origin(self, output: Dataset, shard: int, row: int) -> Iterator[Story]:
        """The stories that end with a row of a shard, from the original file on."""
        fate = fate_of(output, shard, row)
        source = self._publisher(fate.file)
        found = source and _read_back(source, fate.file, fate.line - 1)
        if not source or not found:
            yield [fate]
            return
        for story in self._from_origin(source, *found):
            yield [*story, fate]


def _file_called(name: str, files: Sequence[str], option: str) -> str:
    """The source file of that path or URI, relative or absolute. Raises InputError unless there is exactly one."""
    # A path from here, or the end of one that is unique
    relative = f"/{name.removeprefix('./')}"
    found = [file for file in files if file in {name, absolute(name)}] or [f for f in files if f.endswith(relative)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{option}: {name!r} is the end of {_some(found)}; write more of the path")
    ends = {file.rpartition("/")[2]: file for file in files}
    near = closest(name.rpartition("/")[2], ends)
    guess = f"did you mean {ends[near]}?" if near else f"the sources are {_some(files)}"
    raise UnknownFileError(f"{option}: {name!r} is not a source file of this output; {guess}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more


def _read_back(source: Dataset, file: str, number: int) -> tuple[int, int] | None:
    """The shard of `source`, and the row in its slice, that row `number` of a published file was made of."""
    if file in source.pools:  # files of pools list rows of the normalization
        shard = next(n for n, entry in enumerate(source.entries) if entry["place"] == source.pools[file])
        return shard, int(source_rows(file)[number])
    try:
        part, document = source.names.document(file, number)
    except (KeyError, IndexError):
        return None
    shard = source.shard_of(part)
    return shard, source.source_row(shard, part.name, document)


def _published(source: Dataset, fate: Fate) -> Iterator[tuple[str, int]]:
    """The published files with a row of `source`, also pools of normalized rows, and its number in each, from 0."""
    for place in fate.places:
        if place.name is not None and place.published_number is not None:
            yield place.name, place.published_number
    shard = next(
        (
            entry["place"]
            for entry in source.entries
            if (entry["key"], entry["file"], entry["start"]) == (fate.key, fate.file, fate.start)
        ),
        "",
    )
    for name in (name for name, place in source.pools.items() if place == shard):
        numbers = np.flatnonzero(source_rows(name) == fate.row)
        yield from ((name, int(number)) for number in numbers)


def why_record(output_dir: str, stories: Sequence[Story]) -> dict[str, Any]:
    """Return the stories as a JSON record for the next command; `path` is the folder."""
    fates = [[{**asdict(fate), "kept": fate.kept} for fate in story] for story in stories]
    return {"why": {"path": absolute(output_dir), "type": open_dataset(output_dir).type, "stories": fates}}


def print_why(output_dir: str, stories: Sequence[Story], console: Console) -> None:
    """Print the stories, each step of a story on its own lines."""
    for story in stories:
        for fate in story:
            for style, line in _lines(fate):
                console.print(Text(visible_line(line), style, overflow="fold"))
        if story[-1].kept and story[-1].path != absolute(output_dir):
            console.print(Text(f"not read by {visible_line(absolute(output_dir))}", "yellow"))
        if any(place.steps is None for place in story[-1].places) and story[-1].type in {"pretrain", "sft"}:
            console.print(
                Text("to see the steps that train on it, pass the folder of a training run, or plan an order", "dim")
            )
        console.print()


def _lines(fate: Fate) -> Iterator[tuple[str, str]]:
    yield "bold", f"{fate.file}:{fate.line}"
    yield (
        "",
        f"  read by {fate.type} {fate.path}: dataset {fate.dataset}, slice {fate.start:,} to {fate.stop:,}, row {fate.row + 1:,} of shard {fate.key}",
    )
    because = f": {fate.detail}" if fate.detail else ""
    similar = f" of {fate.duplicate_of} (similarity {fate.jaccard:.3f})" if fate.duplicate_of and fate.jaccard else ""
    if not fate.kept:
        yield "red", f"  dropped: {fate.reason or 'for an unknown reason'}{similar}{because}"
        return
    if fate.reason:
        yield "yellow", f"  tagged: {fate.reason}{similar}"
    unused = "" if fate.weight else "; its dataset has weight 0, so it is not trained on"
    yield "green", f"  kept as document {fate.document} of {fate.split}{unused}{because}"
    for place in fate.places:
        tokens = "" if place.tokens is None else f", {counted(place.tokens, 'token')}"
        number = (place.number if place.name is None else place.published_number) or 0
        if place.name is None:
            yield "", f"  in {place.unit} {number + 1:,} of the shard{tokens}, which is not published"
        else:
            steps = "" if place.steps is None else f"; {describe_steps(place.steps)}"
            yield "", f"  in {place.unit} {number + 1:,} of {place.name}{tokens}{steps}"


def describe_steps(steps: Sequence[Read]) -> str:
    """Return the steps that read a document."""
    if not steps:
        return "read by no step"
    more = f" and {len(steps) - MOST_STEPS:,} more" if len(steps) > MOST_STEPS else ""
    return (
        "read by step " + ", ".join(f"{each.step:,} (sample {each.sample + 1})" for each in steps[:MOST_STEPS]) + more
    )
