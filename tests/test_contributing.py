"""The kind of preparation that CONTRIBUTING.md shows is real: its diff is applied to a copy of the project, and it runs."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.flows.prefect_commands import shared_server
from tests.flows.preparation_runs import ran
from tests.preparing import write_lines

ROOT = Path(__file__).parent.parent
MOST_LINES = 45

TEXTS = [f"document {number}: {'é' * (number % 7)}" for number in range(60)]


def diff():
    (found,) = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    return found.splitlines()


def apply(lines, folder):
    """Write new files, and insert lines behind the line of context in files that are there."""
    path, behind = None, None
    for line in lines:
        if line.startswith("+++ b/"):
            path, behind = folder / line.removeprefix("+++ b/"), None
            path.parent.mkdir(exist_ok=True)
        elif line.startswith(" "):
            behind = line[1:] + "\n"
            assert path.read_text().count(behind) == 1
        elif behind is None:
            path.write_text((path.read_text() if path.exists() else "") + line[1:] + "\n")
        else:
            path.write_text(path.read_text().replace(behind, behind + line[1:] + "\n"))


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """`called(*words)` runs a Python of the changed project; what it printed."""
    place = tmp_path_factory.mktemp("project")
    for folder in ("flows", "tasks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, place / "tokenmill" / folder, ignore=ignored)
    for name in ("__init__.py", "prefect.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, place / "tokenmill" / name)
    apply(diff(), place / "tokenmill")

    def call(*words):
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = ran(sys.executable, *words, cwd=place, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call.place = place
    return call


@pytest.fixture(scope="module")
def command(called):
    return lambda *words: json.loads(called("-c", "from tokenmill.flows.cli import main; main()", *map(str, words)))


def test_the_diff_is_short():
    assert len(diff()) <= MOST_LINES


@pytest.mark.slow
def test_the_kind_in_the_contributing_guide_is_planned_prepared_and_verified(called, command, tmp_path):
    source = write_lines(tmp_path / "texts.jsonl", [*TEXTS, b"not JSON"])
    blend = tmp_path / "blend.json"
    blend.write_text(json.dumps({"datasets": [{"name": "texts", "path": str(source)}]}))
    out = tmp_path / "out"
    assert command("plan", blend, "--format", "json", "--kind", "lengths")["plan"]["shards"]["pending"] == 1
    record = command("lengths", blend, "--output-dir", out, "workers=1", "max_bad_row_fraction=1")["lengths"]
    assert (record["rows"], record["documents"], record["dropped"]) == (61, 60, {"malformed_json": 1})
    assert command("verify", out)["verify"]["shards"] == 1
    (part,) = out.glob("lengths/*.parquet")
    longest = max(map(len, TEXTS))
    assert pq.read_table(part)["length"].to_pylist() == [len(text) / longest for text in TEXTS]


@pytest.mark.slow
def test_the_kind_in_the_contributing_guide_is_deployed_and_kept_up_to_date_at_night(
    called, command, tmp_path, monkeypatch
):
    declared = yaml.safe_load((called.place / "tokenmill/prefect.yaml").read_text())["deployments"][0]
    program = "from prefect.flows import load_flow_from_entrypoint as load; import sys; print(load(sys.argv[1]).name)"
    assert called("-c", program, declared["entrypoint"]).strip() == declared["name"] == "measure-lengths"
    source = write_lines(tmp_path / "texts.jsonl", TEXTS)
    (tmp_path / "blends/lengths").mkdir(parents=True)
    (tmp_path / "blends/lengths/texts.json").write_text(
        json.dumps({"datasets": [{"name": "texts", "path": str(source)}]})
    )
    server = shared_server(Path(os.environ["TOKENMILL_TEST_SHARED"], "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    monkeypatch.setenv("PREFECT_HOME", str(server.home))
    nights = [command("nightly", tmp_path / "blends", "--output-dir", tmp_path / "out", "--workers", 1) for _ in "12"]
    assert [night["nightly"]["blends"]["lengths/texts"]["result"] for night in nights] == ["prepared", "unchanged"]
