"""`tokenmill deploy`: what it writes into a folder, what it refuses; and an installed wheel, which deploys and runs on each Python."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.schema_tools.validation import validate
from tokenmill.flows import deployed_choices
from tokenmill.flows.cli import run
from tokenmill.flows.deployed_choices import closed, digests, merged
from tokenmill.flows.deploying import write_project
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.nightly.blends import find_blends

from tests.flows.cloning import REPOSITORY
from tests.flows.prefect_commands import running, wait_until
from tests.flows.preparation_runs import ran

SECONDS = 240


def test_an_empty_folder_gets_all_that_prefect_yaml_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = write_project(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*written}
    for name in ("prefect.yaml", "prefect.toml"):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / name).read_bytes()
    parameters = [each["parameters"] for each in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]]
    blends = [load_blend(each["blend"]) for each in parameters if "blend" in each]
    nights = [
        load_blend(found.path) for each in parameters if "blends" in each for found in find_blends(each["blends"])
    ]
    sources = [source for blend in [*blends, *nights] for part in blend.parts().values() for source in part]
    assert {Path(source.path).exists() for source in sources} == {True}
    assert all(Path(source.path).is_relative_to(tmp_path) for source in sources)


def test_existing_files_are_kept(tmp_path):
    (tmp_path / "prefect.toml").write_text("[results]\n")
    assert "prefect.toml" not in write_project(tmp_path)
    assert (tmp_path / "prefect.toml").read_text() == "[results]\n"
    (tmp_path / "prefect.yaml").write_text("deployments: []\n")
    (tmp_path / "blends/tiny.json").unlink()
    assert write_project(tmp_path) == []


@pytest.mark.parametrize("declared", ["deployments: {", "- a", "deployments:\n- {entrypoint: a.b}", "", "\0"])
def test_empty_prefect_yaml_is_rejected(declared, tmp_path, monkeypatch, capsys):
    (tmp_path / "prefect.yaml").write_text(declared)
    assert called_in(tmp_path, monkeypatch, "http://127.0.0.1:1/api") == 2
    assert "prefect.yaml: " in capsys.readouterr().err


def called_in(folder, monkeypatch, url):
    """The exit code of `tokenmill deploy` in a folder, with the server at a URL."""
    monkeypatch.chdir(folder)
    with temporary_settings({PREFECT_API_URL: url}):
        return run(["deploy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "remedy"), [(None, "prefect server start"), ("http://127.0.0.1:1/api", "no Prefect server answers")]
)
def test_without_a_server_nothing_is_deployed(url, remedy, tmp_path, monkeypatch, capsys):
    assert called_in(tmp_path, monkeypatch, url) == 2
    assert remedy in capsys.readouterr().err
    if url is None:
        assert not list(tmp_path.iterdir())


def test_only_new_declarations_are_applied():
    noted = {"parameters": digests({"same": 1, "changed": 1, "gone": 1, "back": 1}), "fields": digests({"tags": ["a"]})}
    declared = {"parameters": {"same": 1, "changed": 2, "new": 3, "back": 1}, "fields": {"tags": ["a"]}}
    standing = {"parameters": {"same": 9, "changed": 9, "gone": 9, "own": 9}, "fields": {"tags": ["b"]}}
    assert merged(declared, noted, standing) == {
        "parameters": {"same": 9, "changed": 2, "new": 3, "own": 9},
        "fields": {"tags": ["b"]},
    }
    assert merged(declared, None, standing) == declared


@pytest.mark.parametrize(
    ("existing", "declared", "kept"),
    [("", "a", False), ("a", "a", False), ("a", "", False), ("ab", "b", False), ("a", "b", True)],
)
def test_schedules_that_differ_are_kept(existing, declared, kept):
    current, deployment = (
        SimpleNamespace(schedules=[SimpleNamespace(schedule=each) for each in names]) for names in (existing, declared)
    )
    assert deployed_choices._declares_other_schedules(deployment, current) is kept  # noqa: SLF001 - a line on stderr


@pytest.mark.parametrize(
    ("entrypoint", "refused"), [("tokenmill.flows.sft.sft_data_prep", True), ("mine.flow", False), (None, False)]
)
def test_schemas_of_own_flows_are_closed(entrypoint, refused):
    schema = {"type": "object", "properties": {"blend": {"type": "string"}}}
    sent = closed(schema, entrypoint)
    assert bool(validate({"blend": "a", "nope": 1}, sent)) is refused
    assert validate({"blend": "a"}, sent) == []


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a virtual environment in which a wheel is installed; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=SECONDS)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    into = ["install", "--quiet", "--no-deps", "--no-index", "--target", packages]
    subprocess.run([sys.executable, "-m", "pip", *into, wheel], check=True, timeout=SECONDS)
    return folder / "venv/bin/python"


@pytest.mark.weekly
def test_a_wheel_deploys_into_an_empty_folder_and_a_worker_runs_it(installed, prefect_server, tmp_path):
    environment = prefect_server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"}

    def of_the_wheel(*words):
        done = ran(installed, "-P", *words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = of_the_wheel("-c", "import tokenmill.flows; print(tokenmill.flows.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    record = json.loads(of_the_wheel("-c", "from tokenmill.flows.cli import main; main()", "deploy"))["deploy"]
    declared = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert {*record["deployed"]} == {f"{each['name']}/{each['name']}" for each in declared}
    log = tmp_path.with_name("worker.log")
    command = [str(installed), "-P", "-m", "prefect", "worker", "start", "--pool", "tokenmill"]
    with running(command, environment, tmp_path, log):
        wait_until(lambda: "started!" in log.read_text(), 60, log)
        of_the_wheel("-m", "prefect", "deployment", "run", "pretrain-data-prep", "--watch")
    assert (tmp_path / "output/pretrain/blend.json").exists()
    assert json.loads((tmp_path / "output/pretrain/blend.json").read_text())["train"]


@pytest.mark.weekly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_runs_on_other_versions_of_python(wheel, version, tmp_path):
    places = [*map(Path, os.get_exec_path()), *Path.home().glob(f".pyenv/versions/{version}.*/bin")]
    found = [place / f"python{version}" for place in places if (place / f"python{version}").is_file()]
    python = next((path for path in found if subprocess.run([path, "--version"], check=False).returncode == 0), None)
    if python is None:
        pytest.skip(f"Python {version} isn't installed")
    subprocess.run([python, "-m", "venv", tmp_path / "environment"], check=True)
    programs = tmp_path / "environment/bin"
    install = [
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--constraint",
        REPOSITORY / "constraints.txt",
        wheel,
    ]
    subprocess.run([programs / "python", *install], check=True)
    lone = {"HOME": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}"}
    done = ran(programs / "tokenmill", "demo", "--output-dir", "out", cwd=tmp_path, env=lone)
    assert done.returncode == 0, done.stderr
    typed = programs.parent / f"lib/python{version}/site-packages/tokenmill/py.typed"
    assert typed.exists()
