"""The pages for beginners, followed word by word: files are saved as they say, commands run, and their output is what they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.cloning import REPOSITORY
from tests.flows.prefect_commands import clean_environment

pytestmark = pytest.mark.slow

PAGES = ["start.md", "tutorial-pretrain.md", "tutorial-sft.md", "tutorial-rl.md", "read-packs.md"]
SAVED = re.compile(r"(?:[Ss]ave\s+(?:it|this|the\s+blend|some\s+conversations)|and\s+this)\s+as\s+`([\w.]+)`")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_happens(page, tmp_path):
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = clean_environment() | {"HOME": str(tmp_path / "home"), "PATH": programs, "COLUMNS": "250"}
    work = tmp_path / "work"
    work.mkdir()
    for step, content in steps((REPOSITORY / "docs" / page).read_text()):
        if isinstance(step, Path):
            (work / step).write_text(content)
            continue
        done = subprocess.run(
            ["bash", "-c", step],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{step}\n{done.stderr}"
        shown = "\n".join(
            line.rstrip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if not line.startswith('{"')
        )
        assert re.search(pattern(content), f"\n{shown}"), f"{step}\n{shown}"
