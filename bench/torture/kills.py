"""Whole commands that are killed at random moments, then run again: the bytes must be those of a run that nothing disturbed.

Each case starts `tokenmill pretrain`, `sft`, `rl`, `harmony` or `dedup` by turns, as a person would, against one Prefect
server. At a random moment it sends SIGKILL to the whole process group, to the flow's process alone, or to one Dask worker.
A run that dies of it is perhaps started and killed once more, then run to its end. What is judged is

* every published and stored byte, against the output of an undisturbed run of the same command in another folder,
* that no temporary file and no process is left,
* that `tokenmill verify` has nothing to report.

Three in four moments lie between the first proven shard and the end of the undisturbed run, because most of a small run
is its start.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import psutil
from tokenmill.tasks.shards.publish import TEMPORARY

from bench.torture.flips import vocabulary
from tests.flows.prefect_commands import PrefectServer, serving
from tests.flows.preparation_runs import called, finish, receipts, start, workers_of
from tests.preparing import blend_of, tree, write_lines
from tests.preparing_rl import write_rows
from tests.preparing_sft import CHATML

COUNT = 40

END_SECONDS = 300
"""A run that was not killed ends within this time, and the processes of one that was."""

EARLY_ONE_IN, TWICE_ONE_IN = 4, 3
"""How many kills come at any moment from the start on, and how many runs are killed a second time."""

WAYS = ("the group", "the group", "the flow", "a worker")
"""What is killed: the flow's process and a worker half as often as the whole process group."""


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing disturbed: what it left, and the seconds until its first proven shard and its end."""

    expected: Mapping[str, bytes]
    first: float
    end: float

    def moment(self, source: random.Random) -> float:
        """Seconds after a start."""
        return source.uniform(0 if not source.randrange(EARLY_ONE_IN) else self.first, self.end)


def run(count: int, seed: int) -> str:
    """Kill `count` runs. Raises AssertionError at the first that does not end with the bytes of an undisturbed one."""
    killed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, own_server(Path(name)) as server:
        commands = Commands(Path(name), server)
        for case in range(count):
            kind = tuple(KINDS)[case % len(KINDS)]
            try:
                killed += commands.killed_and_repeated(kind, case, random.Random(f"{seed}-{case}"))
            except Exception as error:
                raise AssertionError(f"seed {seed}, case {case} ({kind}): {error!r}") from error
            print(f"\r{case + 1} of {count}: {dict(killed)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    ways = ", ".join(f"{killed[way]} of {way}" for way in dict.fromkeys(WAYS))
    again = killed.total() - count
    return (
        f"{count} runs of {min(count, len(KINDS))} kinds: {killed.total()} kills ({ways}; {commands.late} while shards "
        f"were built; {again} second ones), all with the bytes of undisturbed runs"
    )


@contextmanager
def own_server(folder: Path) -> Iterator[PrefectServer]:
    """A Prefect server and a user's cache in a folder."""
    home = folder / "prefect"
    home.mkdir()
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}), serving(home) as server:
        yield server


class Commands:
    """The commands of all kinds on data in a folder, and what each leaves when nothing disturbs it."""

    def __init__(self, folder: Path, server: PrefectServer) -> None:
        self.folder, self.server, self.late = folder, server, 0
        self.undisturbed = cache(self._undisturbed)
        self.arguments = cache(lambda kind: KINDS[kind](folder))

    def start(self, kind: str, out: Path) -> subprocess.Popen[str]:
        """A process in a group of its own."""
        blend = self.folder / f"{kind}.json"
        if not blend.exists():
            blend.write_text(json.dumps(self.arguments(kind)[0]))
        return start(kind, blend, out, self.server, "--workers", "2", *self.arguments(kind)[1])

    def _undisturbed(self, kind: str) -> Undisturbed:
        out, began, first = self.folder / f"{kind}-undisturbed", time.monotonic(), 0.0
        process = self.start(kind, out)
        while process.poll() is None:
            first = first or (time.monotonic() - began if receipts(out) else 0.0)
            time.sleep(0.02)
        end = time.monotonic() - began
        finish(process)
        return Undisturbed(tree(out), first, end)

    def killed_and_repeated(self, kind: str, case: int, source: random.Random) -> Counter[str]:
        """Kill a run of a kind once or twice, repeat it, and judge what it left. Returns what was killed, and how often."""
        undisturbed, out = self.undisturbed(kind), self.folder / f"{kind}-{case}"
        killed: Counter[str] = Counter()
        kills = 1 if source.randrange(TWICE_ONE_IN) else 2
        while True:
            process, way = self.start(kind, out), source.choice(WAYS)
            if kill(process, way, undisturbed.moment(source), source):
                killed[way] += 1
                self.late += bool(receipts(out))
            died = process.returncode == -signal.SIGKILL
            if died and killed.total() < kills:
                continue
            finish(self.start(kind, out) if died else process, END_SECONDS)
            self.judge(out, undisturbed.expected)
            shutil.rmtree(out)
            if killed.total() >= kills:
                return killed

    def judge(self, out: Path, expected: Mapping[str, bytes]) -> None:
        """Raises AssertionError unless a folder holds what is expected, whole, and nothing else."""
        temporary = [str(path) for path in out.rglob("*") if TEMPORARY.fullmatch(path.name)]
        assert not temporary, f"left behind: {temporary}"
        found = tree(out)
        different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        assert not different, f"not what an undisturbed run leaves: {different}"
        verified = called("verify", out)
        assert verified.returncode == 0, verified.stderr


def kill(process: subprocess.Popen[str], way: str, seconds: float, source: random.Random) -> bool:
    """Kill what `way` says, so many seconds from now, and wait until all that dies of it is gone.

    Returns whether there was anything to kill: a run may end before. Raises AssertionError for a process that lives on.
    """
    moment = time.monotonic() + seconds
    while process.poll() is None and (time.monotonic() < moment or (way == "a worker" and not workers_of(process.pid))):
        time.sleep(0.005)
    if process.poll() is not None:
        return False
    if way == "a worker":
        source.choice(workers_of(process.pid)).kill()
        return True
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL) if way == "the group" else process.kill()
    process.wait()
    alive = psutil.wait_procs(children, timeout=END_SECONDS)[1]
    assert not alive, f"lives on without its run: {alive}"
    process.communicate()
    return True


Made = tuple[dict[str, object], list[str]]
"""A blend, and the arguments that it is prepared with."""


def _pretrain(folder: Path) -> Made:
    return _texts(folder), ["shard_size=10kB", f"tokenizer.model={vocabulary(folder)}"]


def _sft(folder: Path) -> Made:
    template = folder / "template.jinja"
    template.write_text(CHATML)
    chosen = ["pack_size=256", f"chat_template={template}", f"tokenizer.model={vocabulary(folder)}"]
    return _chats(folder), ["shard_size=10kB", *chosen]


def _rl(folder: Path) -> Made:
    rows = [{"question": f"What is {number} + 1? " * 5, "answer": str(number + 1)} for number in range(6_000)]
    return blend_of(write_rows(folder / "sums.jsonl", [*rows, b"broken"])), ["shard_size=10kB"]


def _harmony(folder: Path) -> Made:
    return _chats(folder), ["shard_size=40kB", "dedup.cap=2"]


def _dedup(folder: Path) -> Made:
    return _texts(folder), ["shard_size=20kB"]


KINDS: Mapping[str, Callable[[Path], Made]] = {
    "pretrain": _pretrain, "sft": _sft, "rl": _rl, "harmony": _harmony, "dedup": _dedup
}  # fmt: skip
"""How the data of each kind are made in a folder."""


def _texts(folder: Path) -> dict[str, object]:
    source = random.Random(0)
    rye = [f"rye {number}: " + " ".join(source.choices(WORDS, k=30)) for number in range(4_000)]
    return blend_of(
        write_lines(folder / "rye.jsonl", [*rye, b"broken", *rye[:50]]),
        write_lines(folder / "oats.jsonl", [*rye[7:30], *["oats " * 9] * 50]),
    )


def _chats(folder: Path) -> dict[str, object]:
    source = random.Random(0)
    chats = [_chat(number, source) for number in range(1_500)]
    return blend_of(write_rows(folder / "chats.jsonl", [*chats, b"broken", *chats[:30]]))


def _chat(number: int, source: random.Random) -> dict[str, object]:
    answer = {"content": " ".join(source.choices(WORDS, k=30)), "reasoning_content": "Let us see."}
    return {"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", **answer}]}


WORDS = [f"w{number}" for number in range(500)]
