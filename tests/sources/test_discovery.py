import gzip
import json
import os
import re
import socket
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import dataset
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.sources.discovery import discover, find
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.selection import in_split, in_subset
from tokenmill.tasks.sources.slices import cut

LINE = b'{"text": "a"}\n'


def put(root: Path, *names: str, content: bytes = LINE) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def source(path, **fields) -> DataSource:
    return DataSource(name="some", path=str(path), **fields)


def found(root: Path, path="", **fields) -> list[str]:
    return [os.path.relpath(file.uri, root) for file in discover(source(root / path, **fields))]


def refusal(path, **fields) -> str:
    with pytest.raises(InputError) as refused:
        discover(source(path, **fields))
    return str(refused.value)


def test_a_folder_is_searched_at_every_depth_for_names_that_can_be_read(tmp_path):
    put(tmp_path, "b.jsonl", "a/b/c.parquet", "a/d.JSONL.GZ", "a/e.json.zst", content=b"")
    put(tmp_path, "notes.txt", "a/f.csv", ".hidden.jsonl", "_cache/g.jsonl", "dataset_infos.json")
    assert found(tmp_path) == ["a/b/c.parquet", "a/d.JSONL.GZ", "a/e.json.zst", "b.jsonl"]


def test_local_file_has_stat_data(tmp_path):
    put(tmp_path, "x.jsonl.gz", content=gzip.compress(LINE))
    os.utime(tmp_path / "x.jsonl.gz", ns=(1, 1_700_000_000_123_456_789))
    expected = SourceFile(
        uri=str(tmp_path / "x.jsonl.gz"),
        size=(tmp_path / "x.jsonl.gz").stat().st_size,
        format="jsonl",
        compression="gzip",
        modified_ns=1_700_000_000_123_456_789,
        changed_ns=(tmp_path / "x.jsonl.gz").stat().st_ctime_ns,
    )
    assert discover(source(tmp_path / "x.jsonl.gz")) == [expected]
    assert discover(source(f"file://{tmp_path}/x.jsonl.gz")) == [expected]
    assert discover(source(f"{tmp_path}/no/../x.jsonl.gz")) == [expected]


def test_an_empty_file_is_kept(tmp_path):
    put(tmp_path, "x.jsonl", "y.json", "z.json.gz", content=b"")
    assert [(file.size, file.format) for file in discover(source(tmp_path))] == [(0, "jsonl")] * 3


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("*/*.jsonl", ["x/b.jsonl", "y/b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "x/b.jsonl", "x/deep/er/c.jsonl", "y/b.jsonl"]),
        ("x/**", ["x/b.jsonl", "x/deep/er/c.jsonl", "x/p.parquet"]),
        ("[xz]/?.*", ["x/b.jsonl", "x/p.parquet"]),
        ("[!x]/*", ["y/b.jsonl"]),
        ("x/deep/*/c.jsonl", ["x/deep/er/c.jsonl"]),
    ],
)
def test_glob_matches(tmp_path, pattern, names):
    put(tmp_path, "a.jsonl", "x/b.jsonl", "x/deep/er/c.jsonl", "x/p.parquet", "y/b.jsonl", "x/n.txt", ".z/b.jsonl")
    assert found(tmp_path, pattern) == names


def test_a_name_with_wildcard_characters_is_taken_as_it_is_when_it_exists(tmp_path):
    put(tmp_path, "part[1].jsonl", "part1.jsonl", "[v2]/x.jsonl", "v/x.jsonl")
    assert found(tmp_path, "part[1].jsonl") == ["part[1].jsonl"]
    assert found(tmp_path, "[v2]") == ["[v2]/x.jsonl"]


def test_linked_folders_are_followed_and_none_is_read_twice(tmp_path):
    put(tmp_path / "elsewhere", "far.jsonl")
    root = tmp_path / "root"
    put(root, "z/real.jsonl")
    for link in ("a", "zz"):
        (root / link).symlink_to(root / "z")
    (root / "z/circle").symlink_to(root)
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (root / "file.jsonl").symlink_to(tmp_path / "elsewhere/far.jsonl")
    assert found(root) == ["out/far.jsonl", "z/real.jsonl"]
    (tmp_path / "door").symlink_to(root)
    assert found(tmp_path, "door") == ["door/out/far.jsonl", "door/z/real.jsonl"]


def test_broken_link_is_rejected(tmp_path):
    put(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    assert str(tmp_path / "b.jsonl") in refusal(tmp_path)


def test_unread_files_are_counted_by_ending(tmp_path):
    put(tmp_path, "a.jsonl", "x/b.parquet", "x/c.csv", "x/y/d.CSV", "e.csv.gz", "notes.txt", "README", "_SUCCESS")
    put(tmp_path, "part.0001", "_temporary/0/a.jsonl")
    put(tmp_path, "x/dataset_info.json", ".e.jsonl", "x/.git/f.jsonl", "x/.git/g.jsonl", "h.orc", "i.tar.gz")
    os.mkfifo(tmp_path / "x/pipe.jsonl")  # nobody waits for it
    assert find(source(tmp_path)).skipped == {
        ".csv": 2, ".csv.gz": 1, ".orc": 1, ".tar.gz": 1, ".txt": 1, "hidden": 4, "metadata": 1,
        "no ending": 2, "no regular file": 1,
    }  # fmt: skip
    assert find(source(tmp_path / "a.jsonl")).skipped == {}
    assert find(source(tmp_path / "x/*")).skipped == {".csv": 1, "hidden": 1, "metadata": 1, "no regular file": 1}
    assert find(source(tmp_path / "x/*.parquet")).skipped == {}
    assert find(source(tmp_path, subset="x")).skipped == {".csv": 2, "hidden": 1, "metadata": 1, "no regular file": 1}


def special(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path.symlink_to("gone.jsonl" if kind == "broken" else "/dev/zero")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pipe", "is a named pipe, .*write its output to a file"),
        ("socket", "is a socket, .*write its output to a file"),
        ("device", "is a device, .*write its output to a file"),
        ("broken", "is a link to gone.jsonl, which does not exist; fix the link"),
    ],
)
def test_special_files_are_named(tmp_path, monkeypatch, kind, words):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    special(Path("x.jsonl"), kind)
    assert re.match(f"{tmp_path}/x.jsonl: {words}", refusal(tmp_path / "x.jsonl"))


def test_unrepresentable_name_is_rejected(tmp_path):
    put(tmp_path, os.fsdecode(b"caf\xe9.jsonl"), os.fsdecode(b"notes\xe9/a.txt"), "b.jsonl")
    assert refusal(tmp_path) == f"'{tmp_path}/caf\\udce9.jsonl': the name is not UTF-8; rename the file or the folder"
    assert found(tmp_path, "b.jsonl") == ["b.jsonl"]


def test_circular_links_are_named(tmp_path):
    put(tmp_path, "in/a.jsonl")
    (tmp_path / "in/b.jsonl").symlink_to("b.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    for path, named in {"in": "in/b.jsonl", "loop": "loop", "loop/x.jsonl": "loop/x.jsonl"}.items():
        words = f"{tmp_path}/{named}: is a link that leads back to itself; fix or remove it"
        assert refusal(tmp_path / path).startswith(words)


def test_missing_path_suggests_the_nearest(tmp_path):
    put(tmp_path, "corpus/train.jsonl", "other/x.jsonl")
    assert str(tmp_path / "corpus/train.jsonl") in refusal(tmp_path / "corpus/trian.jsonl")
    assert str(tmp_path / "corpus") in refusal(tmp_path / "corpsu/train.jsonl")
    assert "'corpus', 'other'" in refusal(tmp_path / "zzz")
    assert "write hf://org/name (" in refusal(tmp_path / "org/name")
    assert "write hf://datasets/org/name (" in refusal(tmp_path / "datasets/org/name")
    assert "write https://hf.co/datasets/org/name/tree/main (" in refusal(
        tmp_path / "hf.co/datasets/org/name/tree/main"
    )


def test_empty_source_lists_the_found_files(tmp_path):
    put(tmp_path, "data/x.xlsx", "data/y.orc")
    (tmp_path / "empty").mkdir()
    assert "'x.xlsx', 'y.orc'" in refusal(tmp_path / "data")
    assert "files not found" in refusal(tmp_path / "empty")
    assert "files not found" in refusal(tmp_path / "data/*.jsonl")
    message = refusal(tmp_path / "data/y.orc")
    assert all(ending in message for ending in (".jsonl", ".csv", ".zst", ".parquet"))
    assert "**/*" in refusal(tmp_path / "**.jsonl")


def test_revision_without_versions_is_rejected(tmp_path):
    put(tmp_path, "x.jsonl")
    assert "'revision'" in refusal(tmp_path, revision="main")


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["a.jsonl", "b.parquet", "c.csv", "d.arrow", "e.txt"], ["a.jsonl", "b.parquet"]),
        (["c.csv.gz", "d.arrow", "e.txt"], ["c.csv.gz", "d.arrow"]),
        (["e.txt", "README.txt", "LICENSE.txt"], ["e.txt"]),
    ],
)
def test_secondary_formats_are_read_without_others(tmp_path, names, read):
    put(tmp_path, *names)
    left = [name for name in names if name not in [*read, "README.txt", "LICENSE.txt"]]
    assert found(tmp_path) == read
    assert [warning.what.partition(", such as ")[2] for warning in find(source(tmp_path)).warnings] == left
    for name in left:
        assert found(tmp_path, f"*{name[1:]}") == [name]


HIDDEN_NAMES = "_SUCCESS.jsonl _temporary/0/a.jsonl x/_delta_log/0.jsonl .x.jsonl x/.crc/a.jsonl _v2/deep/a.jsonl"
HIDDEN = HIDDEN_NAMES.split()


def test_hidden_names_match_pyarrow(tmp_path, memory):
    put(tmp_path, "a.jsonl", "x/b_.jsonl", "x_/c.jsonl", *HIDDEN)
    memory.pipe({f"/corpus/{path.relative_to(tmp_path)}": LINE for path in tmp_path.rglob("*.jsonl")})
    judge = [os.path.relpath(path, tmp_path) for path in dataset.dataset(tmp_path, format="json").files]
    assert found(tmp_path) == sorted(judge) == ["a.jsonl", "x/b_.jsonl", "x_/c.jsonl"]
    assert [file.uri for file in discover(source("memory://corpus"))] == [f"memory://corpus/{name}" for name in judge]
    assert find(source(tmp_path)).skipped == find(source("memory://corpus")).skipped == {"hidden": 6}


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("_v2", ["_v2/deep/a.jsonl"]),
        ("_v2/*/*.jsonl", ["_v2/deep/a.jsonl"]),
        ("*/_delta_log/*.jsonl", ["x/_delta_log/0.jsonl"]),
        ("**/.crc/*", ["x/.crc/a.jsonl"]),
        ("_*.jsonl", ["_SUCCESS.jsonl"]),
        (".x.jsonl", [".x.jsonl"]),
        ("_temporary/0/a.jsonl", ["_temporary/0/a.jsonl"]),
    ],
)
def test_hidden_names_that_are_named_are_read(tmp_path, path, read):
    put(tmp_path, "a.jsonl", *HIDDEN)
    assert found(tmp_path, path) == read


SNAPSHOTS = {
    "the same file twice": ("aaa", [("aaa", "train", "0123"), ("bbb", "train", "0123")], ["aaa/train"], 0),
    "two versions of a file": ("bbb", [("aaa", "train", "0123"), ("bbb", "train", "4567")], ["bbb/train"], 1),
    "a file that was added": ("bbb", [("aaa", "train", "0123"), ("bbb", "train", "0123"), ("bbb", "b", "4567")], ["bbb/b", "bbb/train"], 0),
    "one snapshot, of another branch": ("ccc", [("aaa", "train", "0123")], ["aaa/train"], 0),
    "no snapshot of main": ("ccc", [("aaa", "train", "0123"), ("bbb", "train", "4567")], None, 0),
}  # fmt: skip
"""The commit of refs/main, links to blobs by commit and name, what is read, and how many other files are warned about."""


@pytest.mark.parametrize(("main", "links", "read", "unread"), SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_one_snapshot_of_a_hub_cache_is_read(tmp_path, main, links, read, unread):
    cache = tmp_path / "datasets--o--n"
    put(cache, *{f"blobs/{blob}" for _, _, blob in links})
    put(cache, "refs/main", content=main.encode())
    for revision, name, blob in links:
        link = cache / "snapshots" / revision / f"{name}.jsonl"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../blobs/{blob}")
    if read is None:
        assert "contains 2 versions of one dataset ('aaa', 'bbb'), and refs/main doesn't name one of them" in refusal(
            cache
        )
    else:
        names = [f"snapshots/{name}.jsonl" for name in read]
        assert found(cache) == found(cache, "**/*.jsonl") == found(cache, "snapshots/*/*.jsonl") == names
        warnings = find(source(tmp_path)).warnings
        assert [(warning.files, warning.bytes) for warning in warnings] == [(unread, unread * len(LINE))] * bool(unread)
    assert [each.partition("/")[0] for each in found(cache / "snapshots", "aaa")] == ["aaa"]


def test_subset_and_split_choose_among_the_files_of_a_folder(tmp_path):
    put(tmp_path, "4plus/train/0.jsonl", "4plus/test/0.jsonl", "4plus_MIND/train/0.jsonl", "4plus_MIND/train-1.jsonl")
    assert found(tmp_path, subset="4plus") == ["4plus/test/0.jsonl", "4plus/train/0.jsonl"]
    assert found(tmp_path, subset="4plus_MIND", split="train") == ["4plus_MIND/train/0.jsonl"]
    (warning,) = find(source(tmp_path, subset="4plus_MIND", split="train")).warnings
    assert (warning.what, warning.files) == (".jsonl, such as 4plus_MIND/train-1.jsonl", 1)
    assert not find(source(tmp_path, subset="4plus", split="train")).warnings
    assert found(tmp_path, "4plus/*/*.jsonl", split="test") == ["4plus/test/0.jsonl"]
    assert "'4plus'" in refusal(tmp_path, subset="4pus")
    assert refusal(tmp_path, split="tset").index("'test'") < refusal(tmp_path, split="tset").index("'train'")


def test_folders_outside_the_one_that_is_named_choose_nothing(tmp_path):
    put(tmp_path / "train", "a/x.jsonl", "a/train.jsonl")
    assert found(tmp_path / "train", split="train") == ["a/train.jsonl"]


OF_TRAIN = (
    "train.jsonl train-00000-of-00001.parquet train-00000.json.gz train_0001.jsonl a/train.12.jsonl train/x.jsonl "
    "a/train/b/x.parquet data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"
)
NOT_OF_TRAIN = "train-extra.jsonl train_extra_0001.jsonl mytrain.jsonl training/x.jsonl train2.jsonl x/test.jsonl"


@pytest.mark.parametrize("name", [*OF_TRAIN.split(), *NOT_OF_TRAIN.split()])
def test_names_of_a_split(name):
    assert in_split(name, "train") == (name in OF_TRAIN.split())


COMPONENT = st.text(alphabet="ab-_.", min_size=1, max_size=4).filter(lambda part: part.strip("."))


@given(st.lists(COMPONENT, min_size=1, max_size=4), COMPONENT)
def test_subset_is_one_of_any_components(components, subset):
    assert in_subset("/".join(components) + ".jsonl", subset) == (subset in components)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'[{"text": "a"}]', "json"),
        (b'\xef\xbb\xbf [{"text": "a"}]', "json"),
        (b" \r\n\t" * (1 << 19) + b"[]", "json"),
        (b'{"text": "[a]"}\n', "jsonl"),
        (b'\xef\xbb\xbf{"text": "a"}', "jsonl"),
        (b"   \n", "jsonl"),
        (b"", "jsonl"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_array_is_recognized_by_its_first_byte(tmp_path, content, expected, ending):
    stored = pa.compress(content, {".gz": "gzip", ".zst": "zstd"}[ending], asbytes=True) if ending else content
    put(tmp_path, f"x.json{ending}", f"y.jsonl{ending}", content=stored)
    array, lines = discover(source(tmp_path))
    assert (array.format, lines.format) == (expected, "jsonl")


def test_json_file_with_wrong_compression_suffix_is_named(tmp_path):
    put(tmp_path, "x.json.gz", content=json.dumps(["plain"]).encode())
    with pytest.raises(RunError, match=r"x\.json\.gz"):
        discover(source(tmp_path))


def test_a_file_that_links_lead_to_is_read_once(tmp_path):
    real, elsewhere = tmp_path / "data/a.jsonl", tmp_path / "elsewhere.jsonl"
    real.parent.mkdir()
    real.write_text('{"text": "a"}\n')
    elsewhere.write_text('{"text": "b"}\n')
    for name, target in {"latest": real, "b": elsewhere, "c": elsewhere}.items():
        (tmp_path / f"data/{name}.jsonl").symlink_to(target)
    found = discover(DataSource(name="data", path=str(tmp_path / "data")))
    assert [Path(file.uri).name for file in found] == ["a.jsonl", "b.jsonl"]
    (alone,) = discover(DataSource(name="data", path=str(tmp_path / "data/latest*.jsonl")))
    assert Path(alone.uri).name == "latest.jsonl"


WARNED = "a.avro b.orc.gz x/C.XLSX d.tar e.sqlite f.warc.gz g.7z h.pkl part-00000 i.jsonl.1 j.jsonl.part k.parquet_bak l.jsonl.br"
NOT_WARNED = (
    "README README.md LICENSE Makefile a.py a.sha256 p.png s.yaml .a.avro .git/b.avro dataset_info.json z.jsonl"
)


@pytest.mark.parametrize("name", [*WARNED.split(), *NOT_WARNED.split()])
def test_files_like_data_that_cannot_be_read_are_warned_about(tmp_path, name):
    put(tmp_path / "in", "a.jsonl")
    put(tmp_path / "in", name, content=b"12345")
    expected = [("unread_files", 1, 5)] if name in WARNED.split() else []
    for place in (tmp_path / "in", f"memory://{tmp_path}/in"):
        fsspec.filesystem("memory").put(str(tmp_path / "in"), f"{tmp_path}/", recursive=True)
        assert [(each.kind, each.files, each.bytes) for each in find(source(place)).warnings] == expected
    assert list(find(source(tmp_path / "in/*.jsonl")).warnings) == []


def test_unread_dangling_link_counts_as_0_bytes(tmp_path):
    put(tmp_path, "a.jsonl", "b.avro")
    (tmp_path / "c.avro").symlink_to("gone")
    (warning,) = find(source(tmp_path)).warnings
    assert (warning.files, warning.bytes) == (2, len(LINE))


class Accounts(MemoryFileSystem):
    """Lists names without the account, and needs it in every URL, as adlfs does, which was tried with Azurite."""

    protocol, store, pseudo_dirs, cachable = "abfss", {}, [""], False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + re.sub(r"^(abfss://)?([^/@]*)@[^/]*", r"\2", path).removeprefix("/").rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(url):
        return {"account": re.match("abfss://[^/]+@([^/]+)", url)[1]}

    def find(self, path, *arguments, **options):
        """The names alone where the path is a file, even if details are asked for."""
        found = super().find(path, *arguments, **options)
        return [*found] if self.isfile(path) else found


@pytest.fixture
def azure():
    fsspec.register_implementation("abfss", Accounts, clobber=True)
    yield
    fsspec.register_implementation("abfss", "adlfs.AzureBlobFileSystem", clobber=True)


@pytest.mark.usefixtures("azure")
def test_azure_files_keep_their_account():
    folder = "abfss://corpus@account.dfs.core.windows.net/data"
    Accounts(account="a").pipe({"/corpus/data/a.jsonl": LINE, "/corpus/data/_x/b.jsonl": LINE})
    for place in (folder, f"{folder}/*.jsonl", f"{folder}/a.jsonl"):
        (file,) = discover(source(place))
        assert file.uri == f"{folder}/a.jsonl"
        assert [batch.texts.to_pylist() for batch in read_texts(cut(file, 100, [])[0], "text")] == [["a"]]
