import hashlib
import json
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.sources import files as source_files
from tokenmill.tasks.sources import hub_client
from tokenmill.tasks.sources.discovery import discover, find
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.opening import find_places, open_source

from tests.hub_server import EXPIRED, LARGE, serve
from tests.preparing import blend_of
from tests.preparing_rl import plan, prepare

ROWS = b'{"text": "a row of text"}\n'


@pytest.fixture
def publish(hub, tmp_path):
    """Adds files of one row to the folder of a repository, and commits it."""

    def publish(*names: str, card: str = "", repository: str = "org/name", branch: str = "main") -> str:
        folder = tmp_path / repository
        for name in names:
            write(folder / name, ROWS)
        if card:
            write(folder / "README.md", f"---\n{card}\n---\n# A dataset\n".encode())
        return hub.dataset(repository).commit(folder, branch)

    return publish


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def source(path: str = "hf://org/name", **fields) -> DataSource:
    return DataSource(name="some", path=path, **fields)


def found(path: str = "hf://org/name", **fields) -> list[str]:
    """Paths in the repository of what discovery finds."""
    return [in_repository(file) for file in discover(source(path, **fields))]


def left(path: str = "hf://org/name", wanted: str | None = None) -> list[tuple[str, str, int]]:
    """The kind and content of each warning about files that aren't read, and how many they are."""
    warnings = find(source(path), wanted).warnings
    assert all(warning.bytes == warning.files * len(ROWS) for warning in warnings)
    return [(warning.kind, warning.what, warning.files) for warning in warnings]


def in_repository(file) -> str:
    return file.uri.partition("@")[2].partition("/")[2]


def refusal(path: str = "hf://org/name", **fields) -> str:
    with pytest.raises(InputError) as refused:
        discover(source(path, **fields))
    return str(refused.value)


def test_files_carry_the_commit_their_size_and_the_checksums_of_git(publish, tmp_path):
    write(tmp_path / "org/name/data/large.jsonl", ROWS * LARGE)
    commit = publish("data/small.jsonl.gz", "LICENSE", ".gitattributes", ".cache/hidden.jsonl")
    large, small = discover(source())
    assert find(source()).skipped == {"hidden": 2, "no ending": 1}
    assert find(source("hf://org/name/data/small.jsonl.gz")).skipped == {}
    assert large.uri == f"hf://datasets/org/name@{commit}/data/large.jsonl"
    assert (large.size, large.version) == (len(ROWS) * LARGE, hashlib.sha256(ROWS * LARGE).hexdigest())
    blob = subprocess.run(["git", "hash-object", "--stdin"], input=ROWS, capture_output=True, check=True).stdout
    assert (small.size, small.version) == (len(ROWS), blob.decode().strip())
    assert (small.format, small.compression) == ("jsonl", "gzip")


def test_moved_branch_keeps_checksums_of_unchanged_files(publish):
    first = publish("data/a.jsonl")
    before = discover(source())
    second = publish("data/b.jsonl")
    after = discover(source())
    assert [file.uri for file in before] == [f"hf://datasets/org/name@{first}/data/a.jsonl"]
    assert [file.uri for file in after] == [f"hf://datasets/org/name@{second}/data/{name}.jsonl" for name in "ab"]
    assert before[0].version == after[0].version


@pytest.mark.parametrize("spell", [lambda r: {"path": f"hf://org/name@{r}"}, lambda r: {"revision": r}])
def test_a_revision_pins_the_files_of_its_commit(publish, spell):
    first = publish("data/a.jsonl")
    publish("data/b.jsonl", branch="refs/pr/7")
    publish("data/c.jsonl")
    assert found(**spell(first)) == ["data/a.jsonl"]
    assert found(**spell("refs/pr/7")) == ["data/a.jsonl", "data/b.jsonl"]
    assert found(**spell("main")) == ["data/a.jsonl", "data/b.jsonl", "data/c.jsonl"]


def test_two_different_revisions_are_rejected(publish):
    publish("data/a.jsonl")
    assert found("hf://org/name@main", revision="main") == ["data/a.jsonl"]
    assert "'other'" in refusal("hf://org/name@main", revision="other")


def test_undeclared_subset_is_rejected_with_the_declared_ones(publish):
    splits = "[{split: train, path: a.jsonl}, {split: test, path: b.jsonl}]"
    card = (
        f"configs:\n- {{config_name: default, data_files: {splits}}}\n- {{config_name: extra, data_files: raw/*.csv}}"
    )
    publish("a.jsonl", "b.jsonl", card=card)
    assert refusal(split="tset").index("'test'") < refusal(split="tset").index("'train'")
    assert "'extra'" in refusal(subset="extras")
    assert "no readable file is in 'train'" in refusal(subset="extra")


@pytest.mark.parametrize("configs", ["foo", "[foo, 3]", "{a: b}", "[{config_name: x}]", "[]", "[{data_files: }]"])
def test_a_card_that_declares_no_files(publish, configs):
    publish("train.jsonl", "test.jsonl", card=f"configs: {configs}")
    assert found(split="train") == ["train.jsonl"]


def test_one_of_several_configurations_is_named(publish):
    names = ("4plus", "4plus_MIND")
    card = "configs:\n" + "".join(f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in names)
    publish(*(f"{name}/part_0.parquet" for name in names), card=card)
    assert found(subset="4plus") == ["4plus/part_0.parquet"]
    assert "name one of them in 'subset': '4plus', '4plus_MIND'" in refusal()


def test_the_default_configuration_is_taken_and_others_are_counted(publish):
    card = """configs:
- {config_name: full, default: true, data_files: "data/*.jsonl"}
- {config_name: sample, data_files: "sample/*.jsonl"}"""
    publish("data/x.jsonl", "sample/x.jsonl", card=card)
    assert found() == ["data/x.jsonl"]
    assert left() == [("unread_subset", "files without a split or from a different subset, such as sample/x.jsonl", 1)]
    assert found(subset="sample") == ["sample/x.jsonl"]


@pytest.mark.parametrize(
    ("wanted", "names"), [("train", ["data/training_0001.jsonl"]), ("valid", ["data/dev-0.jsonl"]), (None, None)]
)
def test_one_split_is_taken_and_others_are_counted(publish, wanted, names):
    every = ["data/dev-0.jsonl", "data/training_0001.jsonl", "test.jsonl"]
    publish(*every, "x.jsonl")
    got = find(source(), wanted)
    assert [in_repository(file) for file in got.files] == (names or every)
    file_of = {"validation": every[0], "train": every[1], "test": every[2]}
    others = [split for split in ("test", "train", "validation") if names and file_of[split] not in names]
    assert left(wanted=wanted) == [
        *[("unread_split", f"split {split!r}, such as {file_of[split]}", 1) for split in others],
        ("unread_subset", "files without a split or from a different subset, such as x.jsonl", 1),
    ]


@pytest.mark.parametrize(
    ("files", "asked", "names"),
    [
        ("data/train.jsonl data/dev-0.jsonl", ["validation", "valid", "val", "dev"], ["data/dev-0.jsonl"]),
        ("train.jsonl eval.jsonl", ["test", "testing", "eval", "evaluation"], ["eval.jsonl"]),
        ("training.jsonl test.jsonl", ["train", "training"], ["training.jsonl"]),
        ("chat_if.jsonl lean_00.jsonl lean_01.jsonl", ["lean"], ["lean_00.jsonl", "lean_01.jsonl"]),
        ("a/train.jsonl a/test.jsonl b/train.jsonl", ["a"], ["a/test.jsonl", "a/train.jsonl"]),
    ],
)
def test_spellings_of_a_split(publish, files, asked, names):
    publish(*files.split())
    assert [found(split=split) for split in asked] == [names] * len(asked)


def test_a_split_on_a_card_is_found_by_any_spelling_unless_two_may_be_meant(publish):
    listed = "[{split: train, path: a.jsonl}, {split: dev, path: b.jsonl}, {split: held_out, path: c.jsonl}"
    publish("a.jsonl", "b.jsonl", "c.jsonl", card=f"configs:\n- {{config_name: x, data_files: {listed}]}}")
    assert found(split="validation") == ["b.jsonl"]
    assert found(split="held_out") == ["c.jsonl"]
    publish("d.jsonl", card=f"configs:\n- {{config_name: x, data_files: {listed}, {{split: val, path: d.jsonl}}]}}")
    assert found(split="val") == ["d.jsonl"]
    assert "'val'" in refusal(split="validation")


def test_several_splits_without_train_are_listed(publish):
    publish(*[f"data/{name}-00000-of-00001.parquet" for name in ("code", "math")], "notes.parquet")
    with pytest.raises(InputError, match=r"name one of them in 'split': 'code', 'math'$"):
        find(source(), "train")
    assert "it has 'math', 'code'" in refusal(split="maths")


def test_one_of_two_formats_is_read_and_the_other_counted(publish):
    publish("data/train-00000-of-00001.parquet", "raw/train.jsonl", "more.parquet", "more.jsonl")
    assert found() == ["data/train-00000-of-00001.parquet"]
    publish("a.parquet", "b.jsonl.gz", "c.json", repository="org/both")
    assert found("hf://org/both") == ["a.parquet"]
    assert left("hf://org/both") == [
        ("unread_format", ".json beside .parquet, such as c.json", 1),
        ("unread_format", ".jsonl beside .parquet, such as b.jsonl.gz", 1),
    ]
    publish("d.json", repository="org/both")
    assert found("hf://org/both") == ["b.jsonl.gz", "c.json", "d.json"]


@pytest.mark.parametrize("revision", ["v1.0", "feature/x", "feature/x/y", "refs/pr/7", "refs/convert/parquet"])
@pytest.mark.parametrize("inside", ["", "/data/a.jsonl", "/data", "/data/*.jsonl", "/"])
def test_branches_and_their_content(publish, revision, inside):
    publish("data/main.jsonl")
    publish("data/a.jsonl", branch=revision)
    names = ["data/a.jsonl"] if "a.jsonl" in inside else ["data/a.jsonl", "data/main.jsonl"]
    for spelled in {revision, revision.replace("/", "%2F"), revision.replace("refs/convert/", "~")}:
        assert found(f"hf://datasets/org/name@{spelled}{inside}") == names


def test_a_dataset_without_an_organization(hub, publish):
    commit = publish("a/train.jsonl", repository="Salesforce/wikitext")
    hub.renamed["datasets/wikitext"] = "Salesforce/wikitext"
    for path in ("hf://wikitext", "hf://datasets/wikitext", "hf://wikitext@main", "hf://datasets/wikitext/"):
        (file,) = discover(source(path))
        assert file.uri == f"hf://datasets/Salesforce/wikitext@{commit}/a/train.jsonl"


def test_a_file_folder_or_glob_inside_a_repository_can_be_named(publish):
    commit = publish("a/x.jsonl", "a/y.jsonl", "ab/x.jsonl", "a/deep/z.jsonl")
    assert found(f"hf://datasets/org/name@{commit}/a/y.jsonl") == ["a/y.jsonl"]
    assert found("hf://org/name/a") == ["a/deep/z.jsonl", "a/x.jsonl", "a/y.jsonl"]
    assert found("hf://org/name/*/x.jsonl") == ["a/x.jsonl", "ab/x.jsonl"]
    assert "'a/x.jsonl'" in refusal("hf://org/name/a/w.jsonl")


def test_repository_without_data_is_rejected_with_its_files(publish):
    publish("data/rows.orc", "data/rows.avro")
    assert "'data/rows.orc'" in refusal()
    assert ".parquet" in refusal()


def test_the_end_point_is_the_one_that_is_set_now(hub, publish, monkeypatch, tmp_path):
    publish("data/x.jsonl")
    assert found() == ["data/x.jsonl"]
    with serve() as other:
        write(tmp_path / "other/data/y.jsonl", ROWS + ROWS)
        other.dataset("org/name").commit(tmp_path / "other")
        monkeypatch.setenv("HF_ENDPOINT", other.url)
        (file,) = discover(source())
        with open_source(file) as stream:
            assert stream.read() == ROWS + ROWS


@pytest.fixture
def stored(hub, monkeypatch):
    """A file in LFS, which the second host has, and its content."""
    monkeypatch.setattr(source_files, "PLACES", {})
    monkeypatch.setattr(hub_client, "PLACES", source_files.PLACES)
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    content = bytes(range(256)) * 64
    hub.dataset("org/name", {"data/a [1]?#%.jsonl": content})
    (file,) = discover(source())
    hub.requests.clear()
    return file, content


def test_a_file_is_asked_for_once_and_then_read_where_it_is_stored(hub, stored):
    file, content = stored
    for start in (1000, 0, 16000):
        with open_source(file, cache="none") as stream:
            stream.seek(start)
            assert stream.read(500) == content[start : start + 500]
    with open_source(file, cache="small") as stream:
        assert stream.read(3) + stream.read() == content
    asked = [(request.path.split("/")[1], request.range, request.token) for request in hub.requests]
    places = ["bytes=1000-1499", "bytes=0-499", "bytes=16000-16383", f"bytes=0-{len(content) - 1}"]
    assert asked == [("datasets", places[0], "hf_member"), *[("lfs", place, None) for place in places]]


@pytest.mark.parametrize("does", [403, 503, "cut"])
def test_store_that_fails_temporarily(hub, stored, does):
    file, content = stored
    with open_source(file, cache="none") as stream:
        assert stream.read(10) == content[:10]
        hub.fault("/lfs/*", does, times=3 if does != 403 else 1)
        assert stream.read(10) == content[10:20]
        hub.fault("/*", does, times=19)  # a request goes to the hub, then to the store
        with pytest.raises(RunError, match=r"^hf://datasets/[^\n]* run the same command again$"):
            stream.read(10)


def test_a_file_that_the_hub_no_longer_has(hub, stored):
    file, _ = stored
    hub.datasets["org/name"].commits.clear()
    with pytest.raises(RunError, match=r"no longer returns it \(404: Invalid rev id\); check [^\n]* again$"):
        open_source(file, cache="small")


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, 300])
def test_requests_of_a_run(hub, tmp_path, monkeypatch, count):
    """One listing, and one request to the hub per file: for its footer in the plan, which names the place of its rows."""
    monkeypatch.setattr(source_files, "PLACES", {})
    monkeypatch.setattr(hub_client, "PLACES", source_files.PLACES)
    written = BytesIO()
    pq.write_table(pa.table({"text": [f"row {number} of a file" for number in range(20)]}), written)
    files = {f"data/train-{n:05}-of-{count:05}.parquet": written.getvalue() for n in range(count)}
    hub.dataset("org/name", files)
    asked = []
    for made in (plan, prepare, plan):
        hub.requests.clear()
        made(blend_of("hf://org/name"), tmp_path / "out")
        paths = [request.path.split("/") for request in hub.requests]
        asked.append((sum("api" in path for path in paths), sum("resolve" in path for path in paths)))
    assert asked == [(1, count), (1, 0), (1, 0)]


def rows_of(part, places):
    """The rows of a slice, in a process that was told of nothing else."""
    source_files.PLACES.update(places)
    return sum(batch.consumed for batch in read_texts(part, "text"))


@pytest.mark.slow
def test_worker_processes_ask_the_hub_for_nothing_but_rows(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "PLACES", {})
    monkeypatch.setattr(hub_client, "PLACES", source_files.PLACES)
    rows = {number: json.dumps({"text": f"{number} word" * 20}) + "\n" for number in range(2)}
    hub.dataset("org/name", {f"data/train-{number:05}-of-00002.jsonl": row * 100 for number, row in rows.items()})
    shards = plan(blend_of("hf://org/name"), tmp_path / "out", shard_size=2_000).plan.pending
    find_places(shard.part for shard in shards)
    hub.requests.clear()
    with ProcessPoolExecutor(4, get_context("spawn")) as workers:
        parts = [shard.part for shard in shards]
        assert sum(workers.map(rows_of, parts, [source_files.places_of([part]) for part in parts])) == 200
    assert {request.path.split("/")[1] for request in hub.requests} == {"lfs"}
    assert len(hub.requests) < 3 * len(shards)


def test_a_gated_repository_needs_a_token_that_was_let_in(hub, publish, monkeypatch):
    hub.dataset("org/name", gated=True, members={"hf_member"})
    publish("data/x.jsonl")
    assert "HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    (file,) = discover(source())
    with open_source(file) as stream:
        assert stream.read() == ROWS


def test_unknown_repository_revision_or_name_is_rejected_with_a_remedy(hub, publish, monkeypatch):
    publish("data/x.jsonl")
    hub.model("org/model", {"config.json": "{}"})
    assert "hf://org/model: it is a model, and a dataset is needed" in refusal("hf://org/model")
    assert "hf://org/nmae: no such dataset on the Hub" in refusal("hf://org/nmae")
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert "hf://org/nmae: no such dataset on the Hub" in refusal("hf://org/nmae")
    monkeypatch.setenv("HF_TOKEN", EXPIRED)
    assert "rejected HF_TOKEN" in refusal()
    monkeypatch.delenv("HF_TOKEN")
    assert "@v2: it doesn't have a branch" in refusal(revision="v2")
    assert "is a model, and sources are datasets" in refusal("hf://models/org/name")
    assert "hf://org/name@revision" in refusal("hf://org/name@")
    assert "not a valid name" in refusal("hf://org/na--me")


@pytest.mark.parametrize(
    ("status", "headers", "waits"),
    [
        (429, {"Retry-After": "7"}, [7, 7, 7, 7]),
        (429, {"Retry-After": "", "RateLimit": '"api";r=0;t=55'}, [55, 55, 55, 55]),
        (429, {"Retry-After": "301"}, []),
        (500, {"Retry-After": ""}, [1, 2, 4, 8]),
        (503, {"Retry-After": "2"}, [2, 2, 2, 2]),
    ],
)
def test_failed_hub_request_is_retried_at_the_requested_time(hub, publish, status, headers, waits):
    publish("data/x.jsonl")
    hub.fault("/api/datasets/*", status, times=len(waits) or 1, headers=headers)
    if waits:
        assert found() == ["data/x.jsonl"]
        assert hub.waits == waits
        hub.fault("/api/datasets/*", status, times=9, headers=headers)
    with pytest.raises(RunError) as failed:
        discover(source())
    assert re.fullmatch(
        r"hf://org/name: the Hub [^\n]*; run the same command again( in 301 seconds)?", str(failed.value)
    )
