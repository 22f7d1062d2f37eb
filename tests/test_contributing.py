"""The stage that CONTRIBUTING.md shows is real: its diff is applied to a copy of the rooms, and its test passes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES = 40

IMPORTS = """
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.lengths.shard import LengthsRecipe, measure_shard
from tokenmill.tasks.lengths.stage import measure
from tokenmill.tasks.shards.identity import shard_identity
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.slices import ContentIndex, cut
from tokenmill.tasks.sources.discovery import discover
from tests.preparing import write_lines
"""


def example():
    """The files of the diff, by path."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    lines = diff.splitlines()
    assert len(lines) <= MOST_LINES
    files, path = {}, None
    for line in lines:
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
            files[path] = ""
        else:
            assert line.startswith("+"), line
            files[path] += line[1:] + "\n"
    return files


@pytest.mark.slow
def test_the_stage_in_the_contributing_guide_works(tmp_path):
    copied = tmp_path / "tokenmill"
    for folder in ("tasks", "tests"):
        shutil.copytree(ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
    for path, content in example().items():
        place = copied / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content if "test" not in place.name else IMPORTS + content)
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copied)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/lengths"],
        cwd=copied,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
