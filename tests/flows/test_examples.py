"""The scripts and the notebook in examples/: each runs in an empty folder and prints what it is there to show."""

import json
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPTS = {
    "prepare": ["1,000 of 1,200 rows", "dropped: {'filtered': 200}"],
    "filter_rows": ["2 documents", "The miller opens the sluice at dawn."],
    "own_stage": ["3 documents, 1 shards built", "3 documents, 0 shards built", "Write to <address>."],
    "read_packs": ["pack 1: 1,022 tokens, 126 trained, longest sequence 73"],
    "rl_rows": [
        "2 rows are ready; dropped: {'missing_field': 1}",
        "rows.jsonl:2: missing_field: there is no responses_create_params.input",
    ],
    "compare_tokenizers": ["o200k_harmony", "cl100k_base", "bytes per token"],
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_script_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SCRIPTS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_result(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert [words for words in SCRIPTS[name] if words not in printed] == [], printed


def test_the_notebook_runs_from_top_to_bottom():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_bytes())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert names["record"]["documents"] == 2
    assert len(names["documents"]) == 2
    assert names["pack"].trained.any()
