"""One wheel is built from the source distribution, and runs on every version of Python that it is for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.cloning import REPOSITORY

pytestmark = [pytest.mark.weekly, pytest.mark.slow, pytest.mark.timeout(1800)]

PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    clone = shutil.copytree(REPOSITORY, folder / "source", ignore=shutil.ignore_patterns(".*", "build", "tests"))
    source = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", source, folder], cwd=clone, check=True, capture_output=True, text=True)
    archive = folder / made.stdout.split()[-1]
    subprocess.run([sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", folder, archive], check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_runs_on_other_versions_of_python(wheel, version, tmp_path):
    places = [*map(Path, os.get_exec_path()), *Path.home().glob(f".pyenv/versions/{version}.*/bin")]
    found = [place / f"python{version}" for place in places if (place / f"python{version}").is_file()]
    python = next((path for path in found if subprocess.run([path, "--version"], check=False).returncode == 0), None)
    if python is None:
        pytest.skip(f"Python {version} isn't installed")
    subprocess.run([python, "-m", "venv", tmp_path / "environment"], check=True)
    programs = tmp_path / "environment/bin"
    install = [*PIP, "install", "--constraint", REPOSITORY / "constraints.txt", wheel]
    subprocess.run([programs / "python", *install], check=True)
    lone = {"HOME": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        [programs / "tokenmill", "demo", "--output-dir", "out"],
        cwd=tmp_path,
        env=lone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    typed = programs.parent / f"lib/python{version}/site-packages/tokenmill/py.typed"
    assert typed.exists()
