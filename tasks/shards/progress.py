"""Progress of a build: shards, documents, bytes and tokens per second, time left, drops, and the slowest shard.

A terminal gets a live display on stderr, a log file a line every LINE_SECONDS; Prefect's log has the same figures. A server is
updated at most every UPDATE_SECONDS, and only if the figure changed.
"""

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from threading import Lock, Timer
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TimeRemainingColumn
from rich.text import Text

UPDATE_SECONDS = 5.0
LINE_SECONDS = 30.0
EXPLAINED_SECONDS = 5.0


@dataclass
class Tally:
    """Running totals of a build, from the records that workers announce."""

    shards: int
    source_bytes: int
    done: int = 0
    done_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: int = 0
    slowest: tuple[float, str] = (0.0, "")
    started: float = field(default_factory=time.monotonic)
    _seen: set[str] = field(default_factory=set[str], repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a finished shard; one that a retried batch announces again counts once."""
        with self._lock:
            if record["key"] in self._seen:
                return
            self._seen.add(record["key"])
            self.done += 1
            self.done_bytes += record["source_bytes"]
            self.documents += record["documents"]
            self.tokens += record["tokens"]
            self.dropped += record["dropped"]
            self.slowest = max(self.slowest, (record["seconds"], record["source"]))

    @property
    def share(self) -> float:
        return min(1.0, self.done_bytes / self.source_bytes) if self.source_bytes else 1.0

    def sentence(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        tokens = f"{self.tokens / seconds / 1e6:,.2f} M tokens/s  " if self.tokens else ""
        line = (
            f"{self.done}/{self.shards} shard{'s' * (self.shards != 1)}  {self.documents / seconds:,.0f} docs/s  "
            f"{self.done_bytes / seconds / 1e6:,.1f} MB/s  {tokens}{self.dropped:,} dropped"
        )
        slowest, source = self.slowest
        return f"{line}  slowest {slowest:.1f} s ({source.rpartition('/')[2]})" if source else line


class ProgressBar:
    """A progress bar on a server. `send` sets its percentage, initially 0; times are in seconds."""

    def __init__(self, send: Callable[[float], object], now: float) -> None:
        self._send, self._sent, self._percent = send, now, 0.0

    def show(self, share: float, now: float) -> None:
        """Show a share, 0 to 1, unless the last request was less than UPDATE_SECONDS ago."""
        if now - self._sent >= UPDATE_SECONDS:
            self.end(share, now)

    def end(self, share: float, now: float) -> None:
        percent = round(100 * share, 1)
        if percent != self._percent:
            self._send(percent)
            self._percent, self._sent = percent, now


@contextmanager
def shown(tally: Tally) -> Generator[Callable[[], None]]:
    """A context whose function shows the tally: on stderr, as a bar with the time left if it is a terminal, as lines if not."""
    console, written = Console(stderr=True), time.monotonic()
    bar = Progress(SpinnerColumn(), BarColumn(bar_width=40), TaskProgressColumn(), TimeRemainingColumn())
    task = bar.add_task("shards", total=1.0)

    def write() -> None:
        nonlocal written
        if time.monotonic() - written >= LINE_SECONDS:
            _write_line(f"{tally.share:.0%}  {tally.sentence()}")
            written = time.monotonic()

    def update() -> None:
        bar.update(task, completed=tally.share)
        live.update(Group(bar, Text(tally.sentence())))

    if not console.is_terminal:
        yield write
        return
    with Live(bar, console=console, transient=True) as live:
        yield update


def say(sentence: str) -> None:
    """Print a sentence on stderr."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(sentence, markup=False, highlight=False)
    else:
        _write_line(sentence)


@contextmanager
def explained(sentence: str) -> Generator[None]:
    """Explain a check that takes a while, once: at the start on a terminal, in a log only if it takes EXPLAINED_SECONDS."""
    if Console(stderr=True).is_terminal:
        _say_once(sentence)
    timer = Timer(EXPLAINED_SECONDS, _say_once, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_say_once = cache(say)


def _write_line(line: str) -> None:
    """Print a line on stderr, unless its terminal or reader is gone."""
    with suppress(OSError):
        sys.stderr.write(f"tokenmill: {line}\n")
