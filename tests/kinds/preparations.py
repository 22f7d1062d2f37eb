"""A small preparation of each kind, with bad rows and every stage that the kind has: what the tests of all kinds run.

`PREPARATIONS[kind](folder)` writes the sources. `run` prepares them into `out`, which `clear` empties; a run in between changes no
byte. `earlier` are other settings, whose output a run replaces.
"""

import json
import os
import random
import shutil
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

from tokenmill.tasks.dedup import rounds
from tokenmill.tasks.runtime import cores

from tests.building import build_here, plan_here, prepare_here
from tests.dedup.test_near import edited, prose
from tests.harmony.rows import AGENTIC
from tests.peers.conversations import assistant, talk, thinking, user
from tests.preparing import blend_of
from tests.preparing_harmony import left_behind
from tests.preparing_rl import write_rows
from tests.preparing_scores import harmony_model
from tests.preparing_sft import CHATML, chat_vocabulary, probing_once
from tests.tokenize.small_vocabularies import byte_level_bpe

LONG_AGO = (1_000_000_000, 1_000_000_000)
CHANGES_NO_BYTE = {
    "max_shrink_fraction": 1.0, "allow_shrink": ["some"], "max_bad_row_fraction": 0.9, "allow_partial": True,
    "cluster": "tcp://nowhere:1", "cluster_timeout": 7.0, "workers": 7,
}  # fmt: skip
"""Settings of every kind, each with a value that no preparation has."""
THREADED = {"nll"}
"""Kinds whose threads a forked child would wait for: torch's."""
REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "blends/tiny"


class Sample:
    """A preparation. `blend` and `settings` name files in `folder`; `dropped` is what every run drops, by reason."""

    kind = ""
    slices = 1_000
    """A `shard_size` that makes more shards."""
    earlier = {}
    dropped = {}

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        self.blend, self.settings = self.write()
        for path in folder.rglob("*"):
            os.utime(path, LONG_AGO)

    def write(self):
        """Write the sources; returns the blend and the settings."""
        raise NotImplementedError

    def rows(self, name, rows):
        return write_rows(self.folder / f"{name}.jsonl", rows)

    def plan(self, **changed):
        return plan_here(self.kind, self.blend, self.out, **{**self.settings, **changed})

    def run(self, build=build_here, **changed):
        return prepare_here(self.kind, self.blend, self.out, build, **{**self.settings, **changed})

    def drops(self, manifest):
        """What a run has dropped, by reason."""
        return manifest["totals"]["dropped"]

    def clear(self, store=None):
        """Empty `out`, or leave a copy of a store of shards there."""
        shutil.rmtree(self.out, ignore_errors=True)
        if store is not None:
            shutil.copytree(store, self.out / "shards")


class Pretraining(Sample):
    """A large file in two shards, and a bundle of small ones."""

    kind, slices = "pretrain", 700
    earlier = {"shard_size": 2_500}
    dropped = {"malformed_json": 1, "null_text": 1}

    def write(self):
        texts = [f"document {number} says hello to the {number * 7919 % 1000}th world" for number in range(120)]
        rows = [{"text": text} for text in texts]
        self.rows("corpus/a", [*rows[:50], b"broken", *rows[50:114]])
        self.rows("corpus/b", [b'{"text": null}'])
        self.rows("corpus/c", rows[114:117])
        self.rows("corpus/d", rows[117:])
        model = str(byte_level_bpe(self.folder / "vocabulary", size=400))
        settings = {"tokenizer": {"model": model}, "shard_size": 4_000, "holdout": {"valid": 0.2, "test": 0}}
        return blend_of(self.folder / "corpus"), settings | {"max_bad_row_fraction": 1.0}


class Packing(Sample):
    """Conversations of two files, with a weight that leaves some packs out."""

    kind = "sft"
    earlier = {"pack_size": 256}
    dropped = {"malformed_json": 1, "no_assistant": 1}

    def write(self):
        rows = [
            talk(user(f"Question {n}?"), thinking("Hm.", f"Answer {n * 7919 % 1000}."), user("So?"), assistant("So."))
            for n in range(40)
        ]
        paths = [
            self.rows("a", [*rows[:15], b"broken", *rows[15:24]]),
            self.rows("b", [*rows[24:], talk(user("Anyone?"))]),
        ]
        model = str(chat_vocabulary(self.folder / "vocabulary"))
        settings = {
            "tokenizer": {"model": model}, "chat_template": CHATML, "pack_size": 128, "sampling": "down",
            "shard_size": 10_000, "holdout": {"valid": 0.2, "test": 0}, "max_bad_row_fraction": 1.0,
        }  # fmt: skip
        return blend_of(*paths, b=0.9), settings


STYLES = {"marbles": "dapo", "rectangles": "skywork"}


def questions(name, count, *tables):
    """Questions of the tiny blend, those that stand in the row itself or in one of `tables`, as rows of `name`."""
    rows = [json.loads(line) for line in (TINY / "questions.jsonl").read_bytes().splitlines()]
    rows = [row for row in rows if row.get("dataset") in {None, *tables}]
    return [{**row, "uuid": f"{name}-{number}"} for number, row in zip(range(count), cycle(rows), strict=False)]


class Reinforcement(Sample):
    """Datasets with questions out of both tables, one of them, and none."""

    kind = "rl"
    earlier = {"holdout": {"valid": 0.4, "test": 0}}
    dropped = {"malformed_json": 1, "placeholder_out_of_range": 1, "missing_field": 1}

    def write(self):
        for name in STYLES:
            shutil.copyfile(TINY / f"{name}.parquet", self.table(name))
        both = questions("both", 22, *STYLES)
        nowhere = {"dataset": "marbles", "_hf_placeholder": {"row": 6, "question_template": None}, "uuid": "none"}
        self.rows("both", [*both[:8], b"broken", *both[8:], nowhere])
        self.rows("one", questions("one", 16, "rectangles"))
        self.rows("none", [{"uuid": "empty"}, *questions("none", 12)])
        settings = {
            "target": "nemo_gym", "transforms": [{"select": ["uuid", "agent_ref", "responses_create_params"]}],
            "holdout": {"valid": 0.2, "test": 0.015}, "max_bad_row_fraction": 1.0,
        }  # fmt: skip
        return {"datasets": self.sources()}, settings

    def table(self, name):
        return self.folder / f"{name}.parquet"

    def sources(self):
        found = []
        for name, tables in {"both": tuple(STYLES), "one": ("rectangles",), "none": ()}.items():
            places = {table: {"path": str(self.table(table)), "style": STYLES[table]} for table in tables}
            asked = {"transforms": [{"resolve_placeholders": places}]} if tables else {}
            found.append({"name": name, "path": str(self.folder / f"{name}.jsonl"), **asked})
        return found


QUESTION = "A mill grinds twelve sacks of wheat in three hours; how many sacks does it grind in seven?"


def conversation(number, end="."):
    """A conversation of some fifty words, of which no other number has runs of five."""
    words = [f"w{number}x{place}" for place in range(50)]
    return talk(user(" ".join(words[:10])), thinking(" ".join(words[10:30]), " ".join(words[30:]) + end))


class Normalizing(Sample):
    """Two datasets with everything that makes a row go, held against an evaluation."""

    kind = "harmony"
    earlier = {"dedup": {"mode": "drop"}}
    dropped = {
        "beyond_cap": 1, "contaminated": 1, "exact_duplicate": 2, "malformed_json": 1, "near_duplicate": 1,
        "no_assistant": 1,
    }  # fmt: skip

    def write(self):
        again = talk(*conversation(5)["messages"][:1], thinking("Again.", "Another answer."))
        asked = talk(user(f"We ask: {QUESTION}"), thinking("4 an hour.", "28."))
        bad = [b"broken", conversation(3), conversation(4, end="!"), talk(user("No answer?")), again, asked]
        paths = [
            self.rows("chats", [*map(conversation, range(8)), *bad]),
            self.rows("orders", [AGENTIC, *map(conversation, range(20, 24)), conversation(7)]),
        ]
        blend = {"datasets": [{**each, "converter": "openai_messages"} for each in blend_of(*paths)["datasets"]]}
        exam = blend_of(self.rows("exam", [{"text": QUESTION}]))
        return blend, {"dedup": {"cap": 1, "evaluations": exam}, "max_bad_row_fraction": 1.0}

    def drops(self, manifest):
        return super().drops(manifest) | left_behind(manifest)


class Deduplicating(Sample):
    """Datasets with versions, copies and bad rows, one of them in another."""

    kind = "dedup"
    earlier = {"mode": "tag"}
    dropped = {
        "exact_duplicate": 3, "near_duplicate": 3, "contaminated": 1, "beyond_cap": 2, "malformed_json": 1, "blank_line": 1,
    }  # fmt: skip

    def write(self):
        generator = random.Random(0)
        texts = [prose(generator, 60) for _ in range(8)]
        versions = [edited(generator, text, 1) for text in texts[:3]]
        asked = {"text": f"{prose(generator, 20)} {texts[7]}", "topic": "asked"}
        one = [{"text": text, "topic": number % 2} for number, text in enumerate(texts[:6])]
        paths = [
            self.rows("one", [*one, b"{broken"]),
            self.rows("two", [{"text": text} for text in [*versions, *texts[3:5]]]),
            self.rows("three", [asked, b"", {"text": f" {texts[0]}"}, {"text": "short", "topic": 0}]),
        ]
        exams = blend_of(self.rows("exam", [{"text": texts[7]}]))
        return blend_of(*paths), {"evaluations": exams, "cap": 1, "cap_by": "topic", "max_bad_row_fraction": 1.0}


class Filtering(Sample):
    """Two files, with rows that a rule drops."""

    kind = "filter"
    earlier = {"rules": []}
    dropped = {"blank_line": 1, "gopher_short_doc": 6, "malformed_json": 1}

    def write(self):
        good = (
            "The mill on the hill is one of those that have been with us for a hundred years, and number {n} of them. "
            * 4
        )
        rows = [{"text": good.format(n=number) if number % 5 else "too short"} for number in range(30)]
        paths = [self.rows("a", [*rows[:14], b"{broken", b""]), self.rows("b", rows[14:])]
        rules = {"rules": ["gopher_quality"], "gopher_quality": {"min_doc_words": 20, "max_avg_word_length": None}}
        return blend_of(*paths), {**rules, "max_bad_row_fraction": 1.0}


class Embedding(Sample):
    """Two files of rows, one of which has a bad one."""

    kind = "embeddings"
    earlier = {"dimensions": 8}
    dropped = {"no_id": 1}
    count = 40
    text = "<|start|>user<|message|>Add one.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>"

    def write(self):
        rows = [{"row_id": str(number), "text": self.text} for number in range(self.count)]
        self.rows("rows/a", rows[: self.count // 2])
        self.rows("rows/b", [*rows[self.count // 2 :], {"text": "nameless"}])
        return str(self.folder / "rows"), {"dimensions": 4, "shard_size": 1_200, "max_bad_row_fraction": 1.0}


class Scoring(Embedding):
    """The same, scored by a model and ranked."""

    kind, count, slices = "nll", 16, 500
    earlier = {"shard_size": 2_400}

    def write(self):
        source, settings = super().write()
        settings.pop("dimensions")
        # A thread for each worker, as workers of Dask have: the last digit of a sum depends on the number of threads.
        return source, {**settings, "model": harmony_model(self.folder / "model"), "workers": cores()}


PREPARATIONS = {
    each.kind: each
    for each in (
        Pretraining, Packing, Reinforcement, Normalizing, Deduplicating, Filtering, Scoring, Embedding
    )
}  # fmt: skip


PARTITION_BYTES = {"dedup": 5_000}
"""Deduplication cuts this work into two partitions. The plan decides, not the workers."""


@contextmanager
def sample(kind, folder):
    """The preparation of a kind, in a context in which it has every stage, and templates are probed once."""
    size = PARTITION_BYTES.get(kind, rounds.PARTITION_BYTES)
    with patch.object(rounds, "PARTITION_BYTES", size), probing_once():
        yield PREPARATIONS[kind](folder)
