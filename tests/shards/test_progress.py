import os
import threading
from contextlib import suppress
from itertools import pairwise

from tokenmill.tasks.shards import progress
from tokenmill.tasks.shards.progress import LINE_SECONDS, UPDATE_SECONDS, ProgressBar, Tally, say, shown


def done(key, **changes):
    record = {
        "key": key, "source": "a.jsonl@0", "source_bytes": 100, "documents": 5, "tokens": 50, "dropped": 1, "seconds": 2.0
    }  # fmt: skip
    return {**record, **changes}


def test_a_tally_adds_up_and_counts_a_shard_once():
    tally = Tally(shards=3, source_bytes=300)
    tally.add(done("one"))
    tally.add(done("two", seconds=7.5))
    tally.add(done("one", seconds=0.0))
    assert (tally.done, tally.documents, tally.tokens, tally.dropped) == (2, 10, 100, 2)
    assert tally.share == 200 / 300
    assert "2/3 shards" in tally.sentence()
    assert "slowest 7.5 s (a.jsonl@0)" in tally.sentence()


def test_server_gets_changes_at_most_every_few_seconds():
    sent = []
    bar = ProgressBar(lambda percent: sent.append((now, percent)), now=0.0)
    for now in [*range(32), *range(132, 164)]:
        bar.show(now % 100 / 64, now)
        bar.show(now % 100 / 64, now)
    times, percents = zip(*sent, strict=True)
    assert all(after - before >= UPDATE_SECONDS for before, after in pairwise([0, *times]))
    assert len(times) >= 64 / UPDATE_SECONDS - 2
    assert all(before < after for before, after in pairwise([0, *percents]))
    bar.end(1.0, now := 165)
    bar.end(1.0, now := 166)
    assert sent[len(times) :] == [(165, 100.0)], "the end is told at once, and once"


def test_a_display_outlives_its_terminal(monkeypatch):
    controlling, terminal = os.openpty()
    with suppress(OSError), os.fdopen(terminal, "w") as stderr:  # closing it would write the last line again
        monkeypatch.setattr("sys.stderr", stderr)
        for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
            monkeypatch.setenv(name, value)
        tally = Tally(shards=1, source_bytes=100)
        with shown(tally) as refresh:
            assert os.read(controlling, 1), "it shows something"
            os.close(controlling)
            tally.add(done("one"))
            refresh()
        say("waiting")
        outlived = True
        monkeypatch.undo()
    assert outlived


def test_log_gets_a_line_every_half_minute(monkeypatch, capsys):
    clock = iter(range(1000, 2000))
    monkeypatch.setattr("tokenmill.tasks.shards.progress.time.monotonic", lambda: float(now[0]))
    now = [next(clock)]
    tally = Tally(shards=3, source_bytes=300)
    lines = {}
    with shown(tally) as refresh:
        for number, now[0] in enumerate(clock):
            if number == 250:
                tally.add(done("one"))
            refresh()
            if line := capsys.readouterr().err:
                lines[now[0]] = line
            if number > 500:
                break
    assert all(after - before == LINE_SECONDS for before, after in pairwise([1000, *lines]))
    assert len(lines) == 502 // LINE_SECONDS
    assert all(line.count("\n") == 1 for line in lines.values())
    assert all(("0%  0/3 shards" if when < 1251 else "33%  1/3 shards") in line for when, line in lines.items())


def test_a_log_explains_long_waits_once(monkeypatch, capsys):
    with progress.explained("check mill: once"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EXPLAINED_SECONDS", 0)
    for _ in range(2):
        with progress.explained("check mill: once"):
            for timer in threading.enumerate():
                if isinstance(timer, threading.Timer):
                    timer.join()
    assert capsys.readouterr().err == "tokenmill: check mill: once\n"
