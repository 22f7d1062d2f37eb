"""Nights in this process, without Prefect or Dask: blends of text that share datasets, and what became of each."""

import json
import os
import time
from pathlib import Path

import yaml
from tokenmill.tasks.nightly.blends import find_blends
from tokenmill.tasks.nightly.night import claimed, compare_blend, follow_prepared, prune_night, store_of
from tokenmill.tasks.nightly.prune import alone_with
from tokenmill.tasks.report.summary import artifact_record
from tokenmill.tasks.shards.receipt import RECEIPT, Receipt

from tests.preparing import prepare, write_lines
from tests.tokenize.small_vocabularies import word_piece

FIRST, SECOND, THIRD = (f"2026-11-{day}" for day in (21, 22, 23))
NEWS, WEB, BOOKS = "pretrain/news", "pretrain/web", "pretrain/books"
SHARD_SIZE = 1000


def at(day):
    """Two o'clock in the night of a day, as a Unix time."""
    return time.mktime(time.strptime(f"{day} 02:00:00 UTC", "%Y-%m-%d %H:%M:%S %Z")) - time.timezone


def texts(name, count):
    return [f"{name} {number} says hello to the {number * 7919 % 1000}th world" for number in range(count)]


def write(path, rows, age=1_000_000):
    """A file of rows that was last modified `age` seconds ago."""
    moment = time.time() - age
    os.utime(write_lines(path, rows), (moment, moment))
    return Path(path)


class Nights:
    """Blends below `folder/blends`, their data in `folder/data`, and what nights make of them in `out`.

    `news` and `web` hold the datasets `common` and `recent`, `books` holds `common` and `old`.
    """

    shard_size = SHARD_SIZE

    def __init__(self, folder, out=None):
        self.folder, self.data, self.blends = folder, folder / "data", folder / "blends"
        self.out = str(out or folder / "out")
        for name, count in (("common", 60), ("recent", 50), ("old", 40)):
            write(self.data / name / "first.jsonl", texts(name, count))
        self.blend("news", "common", "recent")
        self.blend("web", "common", "recent")
        self.blend("books", "common", "old")
        model = str(word_piece(folder / "vocabulary"))
        defaults = {"tokenizer": {"model": model}, "shard_size": self.shard_size, "holdout": {"valid": 0.1, "test": 0}}
        self.settings("defaults", **defaults)

    def blend(self, name, *datasets, **weights):
        sources = [{"name": each, "path": str(self.data / each), "weight": weights.get(each, 1.0)} for each in datasets]
        path = self.blends / "pretrain" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"datasets": sources}))

    def settings(self, name, **settings):
        (self.blends / "pretrain" / f"{name}.yaml").write_text(yaml.safe_dump(settings))

    def append(self, name, rows, file="first"):
        """More rows at the end of a file of a dataset."""
        path = self.data / name / f"{file}.jsonl"
        earlier = path.read_bytes().splitlines() if path.exists() else []
        return write(path, [*earlier, *rows], age=500_000)

    def compare(self, day=FIRST):
        """The comparison of each blend, by name."""
        return {blend.name: compare_blend(blend, self.out, {}, at(day)) for blend in find_blends(str(self.blends))}

    def run(self, day, keep=7, grace_seconds=3600.0, also_keep=()):
        """A night: the manifest of each blend that got a new version, by name."""
        made = {}
        with alone_with(store_of(self.out)):
            for blend in find_blends(str(self.blends)):
                compared = compare_blend(blend, self.out, {}, at(day))
                if compared.reasons:
                    compared = claimed(compared, at(day))
                    _, made[blend.name] = prepare(blend.path, compared.path, **compared.chosen)
                    follow_prepared(compared, artifact_record(made[blend.name], compared.path))
            self.versions_gone, self.leftovers = prune_night(self.out, keep, grace_seconds, also_keep)
        return made

    def latest(self, name):
        """What latest.json says of a blend."""
        ((kind, record),) = json.loads((Path(self.out) / name / "latest.json").read_bytes()).items()
        assert kind == name.partition("/")[0]
        return record

    def versions(self, name):
        return sorted(path.name for path in (Path(self.out) / name).iterdir() if path.is_dir())

    def receipts(self, kind="pretrain"):
        """Every receipt of a kind in the store, by key."""
        found = map(Path.read_bytes, Path(store_of(self.out)).glob(f"{kind}/*/{RECEIPT}"))
        return {receipt.key: receipt for receipt in map(Receipt.load, found)}

    def grow_old(self, seconds=7 * 24 * 3600):
        """Let all shards be as old as that."""
        for path in Path(store_of(self.out)).rglob("*"):
            moment = path.stat().st_mtime - seconds
            os.utime(path, (moment, moment))


def whereabouts(folder):
    """Inode and time of the last change of everything in a folder, by path."""
    paths = [Path(folder), *Path(folder).rglob("*")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}
