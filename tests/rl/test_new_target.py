"""The file that CONTRIBUTING.md shows is a whole target: it is added to the package, and rows are prepared for it."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from tokenmill.tasks.errors import InputError

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
PACKAGE = "tokenmill.tasks.rl"


@pytest.fixture
def preparing(tmp_path, monkeypatch):
    """`tests.preparing_rl` of a process in which the package of targets has one more file."""
    page = CONTRIBUTING.read_text().partition("## A new RL target")[2]
    (tmp_path / "quiz.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    targets = importlib.import_module(f"{PACKAGE}.targets")
    for name in [name for name in sys.modules if name.startswith((PACKAGE, "tests.preparing_rl"))]:
        monkeypatch.delitem(sys.modules, name)
    find_spec = importlib.machinery.PathFinder.find_spec

    def with_one_more(name, path=None, target=None):
        spec = find_spec(name, path, target)
        if name == targets.__name__:
            spec.submodule_search_locations.append(str(tmp_path))
        return spec

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", with_one_more)
    yield importlib.import_module("tests.preparing_rl")
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)  # and the ones before come back


def test_a_new_target_is_one_file(tmp_path, preparing):
    rows = [{"question": "2 + 2?", "answer": "4"}, {"question": "", "answer": "4"}, {"question": "3 + 3?"}]
    blend = {"datasets": [{"name": "a", "path": str(preparing.write_rows(tmp_path / "a.jsonl", rows))}]}
    _, manifest = preparing.prepare(blend, tmp_path / "out", target="quiz")
    assert preparing.lines_of(manifest["train"]) == [b'{"question": "2 + 2?", "answer": "4"}']
    assert manifest["totals"]["dropped"] == {"empty_text": 1, "missing_field": 1}
    (target,) = (each for name, each in sys.modules[f"{PACKAGE}.targets"].TARGETS.items() if name == "quiz")
    assert target.texts(rows[0]) == ["2 + 2?", "4"]
    with pytest.raises(InputError, match=r"'nemo_gym'.*'quiz'"):
        preparing.plan(blend, tmp_path / "out", target="quizz")
