"""The pages for beginners, followed word by word: files are saved as they say, commands run, and their output is what they show."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.flows.cloning import REPOSITORY
from tests.flows.terminals import Terminal, lonely_host, started

pytestmark = pytest.mark.slow

PAGES = ["start.md", "tutorial-pretrain.md", "tutorial-sft.md", "tutorial-rl.md", "read-packs.md"]
SAVED = re.compile(
    r"(?:[Ss]ave\s+(?:it|this|the\s+blend|some\s+conversations)|(?:and|files,)\s+this|and\s+its\s+settings,\s+next\s+to\s+it,)\s+as\s+`([\w./-]+)`"
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STAYS = re.compile(r"prefect (server|worker) start")
"""Commands that have a terminal of their own."""


def steps(text):
    """What a page asks for, in its order: the name and content of a file, or a command with the output that it shows."""
    end = 0
    for block in BLOCK.finditer(text):
        language, content = block.groups()
        if language == "console":
            yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE)
        else:
            yield Path(SAVED.findall(text[end : block.start()])[-1]), content
        end = block.end()


def pattern(output):
    """A pattern of the output that a page shows: `…` stands for anything, also for whole lines."""
    lines = [re.escape(line.rstrip()).replace("…", ".*?") for line in output.splitlines()]
    return re.sub(r"(?:^|\n)\.\*\?(?=\n|$)", r"(?:\n[^\n]*)*", "\n" + "\n".join(lines))


def follow(page, host, folder, without=(), **variables):
    """Do what a page asks for, without some words, in an empty folder, and compare what commands print with what it shows."""
    work = folder / "work"
    work.mkdir()
    (folder / "home").mkdir()
    terminal = Terminal(host, work, folder / "home", COLUMNS="250", **variables)
    with ExitStack() as stack:
        text = (REPOSITORY / "docs" / page).read_text()
        for words in without:
            assert words in text
            text = text.replace(words, "")
        for step, content in steps(text):
            if isinstance(step, Path):
                (work / step).parent.mkdir(parents=True, exist_ok=True)
                (work / step).write_text(content)
            elif STAYS.match(step):
                command, log = terminal.keep_running(step)
                started(terminal, step, stack.enter_context(command), log)
            else:
                printed = [line.rstrip() for line in terminal.run(step).splitlines() if not line.startswith('{"')]
                shown = "\n".join(["", *printed])
                assert re.search(pattern(content), shown), f"{step}\n{shown}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_happens(page, tmp_path):
    follow(page, [], tmp_path)


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_a_blend_is_prepared_every_night(tmp_path):
    with lonely_host() as host:
        follow("tutorial-nightly.md", host, tmp_path)


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_a_first_hour_succeeds():
    from bench import first_hour  # noqa: PLC0415 - it follows pages with this module

    assert first_hour.main() == 0
