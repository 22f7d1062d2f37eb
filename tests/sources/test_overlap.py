"""Whatever a search of a source would find, now or after the next run, must not be what a preparation writes.

The judge is discovery itself: a file is put where the output would lie, and the source is refused exactly if it is found.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.discovery import discover, require_no_overlap

ROW = '{"text": "a"}\n'


def refused(source, output, published=None):
    try:
        require_no_overlap("dataset 'web'", str(source), {"the output folder": str(output)}, published)
    except InputError:
        return True
    return False


def found(source, folder):
    """Whether discovery takes files that lie in `folder` under any name that a glob of these tests may ask for."""
    for name in ("blend.json", "train.jsonl", "data/web/part.jsonl", "a/b/c/d.jsonl"):
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ROW)
    listed = []
    with suppress(InputError):
        listed = discover(DataSource(name="web", path=str(source)))
    return any(Path(file.uri).resolve().is_relative_to(Path(folder).resolve()) for file in listed)


@pytest.fixture
def data(tmp_path):
    """A folder of data, a neighbour that is linked into it, and a circle."""
    for name in ("data/a.jsonl", "data/2024/b.jsonl", "elsewhere/deep/c.txt", "other/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROW)
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/circle").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere/onward").symlink_to(tmp_path / "other")
    return tmp_path


PLACES = {
    "data": "data data/out data/2024/deep/out elsewhere/out elsewhere/deep/out data/link/deep/out other/out out data2 data/.out "
    "data/.cache/deep/out",
    "data/*.jsonl": "data/out",
    "data/*/*.jsonl": "data/out data/link/out",
    "data/*/*/*.jsonl": "elsewhere/out",
    "data/20*/*.jsonl": "data/out",
    "data/20*/**/*.jsonl": "data/2024/x/y/out",
    "data/**/*.jsonl": "data/x/y/out",
    "data/*/train.jsonl": "data/out",
    "data/a.jsonl": "data/out",
    "data/link": "elsewhere/out",
    "elsewhere": "data/link/out",
    "data/circle/circle/2024": "data/2024/out",
}
"""Sources, and output folders to try with each."""


@pytest.mark.parametrize(("source", "output"), [(one, each) for one, some in PLACES.items() for each in some.split()])
def test_output_overlap_matches_discovery(data, source, output):
    before = refused(data / source, data / output)
    assert before == found(data / source, data / output)
    assert refused(data / source, data / output) == before, "the second run is told the same as the first"


def test_relative_paths_and_home_folders_are_places_like_others(data, monkeypatch):
    monkeypatch.chdir(data / "data")
    monkeypatch.setenv("HOME", str(data))
    assert refused(".", "out")
    assert refused("~/data", "../data/out")
    assert refused(f"file://{data}/data", "~/data/out")
    assert not refused("2024", "out")


@pytest.mark.parametrize(
    ("source", "inside"),
    [("out/raw", True), ("out", True), ("out/raw/*.jsonl", True), ("in/link", True), ("in", True), ("out2", False)],
)
def test_source_in_the_output_folder_is_rejected(tmp_path, source, inside):
    for name in ("out/raw/a.jsonl", "out2/a.jsonl", "in/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROW)
    (tmp_path / "in/link").symlink_to(tmp_path / "out/raw")
    assert refused(tmp_path / source, tmp_path / "store", str(tmp_path / "out")) == inside


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        ("memory://b/data", "memory://b/data/out", True),
        ("memory://b/data/", "memory://b/data", True),
        ("memory://b/data", "memory://b/data2", False),
        ("memory://b/data", "memory://b/out", False),
        ("memory://b/data/*.jsonl", "memory://b/data/out", False),
        ("memory://b/data/**/*.jsonl", "memory://b/data/x/out", True),
        ("memory://b/data/*/*.jsonl", "memory://b/data/out/", True),
        ("memory://b/data", "memory://b/data/.out", False),
        ("memory://b/data", "/b/data/out", False),
        ("hf://org/name", "/out", False),
        ("s3://b/data", "s3a://b/data/out", True),
        ("s3://b/data", "s3://c/data/out", False),
    ],
)
def test_prefixes_of_object_stores_are_folders(source, output, expected, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert refused(source, output) == expected
    if source.startswith("memory"):
        assert refused(output.rstrip("/") + "/a.jsonl", "memory://other", output)


def test_overlap_error_names_place_and_remedy(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError) as error:
        require_no_overlap("dataset 'web'", f"{tmp_path}/data", {"the store": f"{tmp_path}/data/shards"})
    said = str(error.value)
    assert "dataset 'web'" in said
    assert f"the store {tmp_path}/data/shards" in said
    assert f"choose a folder outside {tmp_path}/data" in said


def test_unreadable_folder_does_not_hide_overlaps(tmp_path):
    (tmp_path / "data/locked").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data/zz").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/locked").chmod(0)
    try:
        assert refused(tmp_path / "data", tmp_path / "elsewhere/out")
    finally:
        (tmp_path / "data/locked").chmod(0o700)
