"""Pushing to a hub on loopback and reading back what is there: the same rows, nothing of this machine, nothing by halves."""

import io
import itertools
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import xxhash
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from tokenmill.flows.cli import run
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.report import push as pushing
from tokenmill.tasks.report.cards import publish_cards
from tokenmill.tasks.report.measured import measured
from tokenmill.tasks.report.push import parcel_of, push, push_record, stale_names, target_of
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.slices import cut

from tests import preparing, preparing_harmony, preparing_rl, preparing_sft
from tests.building import publish_here
from tests.hub_server import EXPIRED, used_here
from tests.peers.conversations import assistant, talk, user
from tests.report.hub_writing_stand_in import READER, WRITER, serve_writable

SCRAP = {".env": "HF_TOKEN=x", "run.log": "x", "data/chats/.part.tmp-1": "x", "notes.md": "x", "data/own.parquet": "x"}
"""What may lie in an output folder and was not published."""

CARDS = ("README.md", "croissant.json")
"""Made from what is published when it is pushed."""


def chats(start, stop):
    return [talk(user(f"What is {number} squared?"), assistant(str(number**2))) for number in range(start, stop)]


def harmony(folder, first=0):
    """A published normalization of two splits, one of them in several shards and with a bad row."""
    sources = []
    splits = {"chats": [*chats(first, first + 40), {"messages": []}], "more": chats(first + 90, first + 95)}
    for name, of in splits.items():
        path = preparing_rl.write_rows(folder / f"secret place/{name}.jsonl", of)
        sources.append({"name": name, "path": str(path), "converter": "openai_messages"})
    preparing_harmony.prepare({"datasets": sources}, folder / "out", shard_size=1500)
    return folder / "out"


def pretraining(folder):
    path = preparing.write_lines(folder / "secret place/text.jsonl", [*(f"text {n}" for n in range(300)), b"{bad"])
    preparing.prepare(preparing.blend_of(path), folder / "out", shard_size=2000, store=str(folder / "the store"))
    return folder / "out"


def sft(folder):
    path = preparing_sft.write_rows(folder / "secret place/chats.jsonl", [*chats(0, 40), {"messages": []}])
    vocabulary = preparing_sft.chat_vocabulary(folder / "secret place/vocabulary")
    preparing_sft.prepare(preparing.blend_of(path), folder / "out", tokenizer={"model": str(vocabulary)}, pack_size=512)
    return folder / "out"


def rl(folder, rows=None):
    path = preparing_rl.write_rows(folder / "secret place/rows.jsonl", [*(rows or chats(0, 40)), b"{bad"])
    preparing_rl.prepare(preparing.blend_of(path), folder / "out", shard_size=500)
    return folder / "out"


KINDS = {each.__name__: each for each in (harmony, pretraining, sft, rl)}


@contextmanager
def hub_at(home):
    """A hub that HF_TOKEN may write to."""
    disable_progress_bars()
    with serve_writable() as hub, used_here(hub, home), pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_TOKEN", WRITER)
        yield hub
    enable_progress_bars()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A published preparation of every kind, none of them to be changed."""
    made = {}

    def output(kind):
        if kind not in made:
            made[kind] = KINDS[kind](tmp_path_factory.mktemp(kind))
            for name, text in SCRAP.items():
                (made[kind] / name).parent.mkdir(parents=True, exist_ok=True)
                (made[kind] / name).write_text(text)
        return made[kind]

    return output


@pytest.fixture
def own(tmp_path):
    """A published preparation that may be changed."""
    return rl(tmp_path / "own")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library's waits between its attempts
    with hub_at(tmp_path / "hf_home") as hub:
        yield hub


@pytest.fixture(scope="module", params=KINDS)
def pushed(request, outputs, tmp_path_factory):
    """A kind, its output with its cards, the commit of its only push, and the files in that."""
    output = outputs(request.param)
    cards = [Path(place) for place in publish_cards(measured(str(output)))]
    with hub_at(tmp_path_factory.mktemp("hf_home")) as hub:
        commit = send(output)
        yield request.param, output, commit, hub.datasets["org/name"].commits[commit]
    for card in cards:
        card.unlink()


def send(output, repository="org/name", *, public=False):
    parcel, target = parcel_of(str(output)), target_of(repository, public=public)
    return push(parcel, target)


def refusal(call, error=InputError):
    with pytest.raises(error) as refused:
        call()
    return str(refused.value)


def writes(hub):
    return sum(hub.writes.values())


def size(files):
    """The bytes of what was pushed, every content once."""
    return sum(map(len, set(files.values()) - {files[".gitattributes"]}))


def rows_of(sources):
    """The rows of datasets as readers of this project see them."""
    slices = [part for source in sources for file in discover(source) for part in cut(file, 10**9, ["text"])]
    return [record for part in slices for batch in read_records(part, ()) for record in batch.records]


@pytest.mark.slow
def test_pushed_rows_read_back(hub, outputs):
    output = outputs("harmony")
    commit = send(output)
    local = rows_of(load_blend(str(output / "blend.json")).datasets)
    assert len(local) == 45
    blend = load_blend(f"hf://datasets/org/name@{commit}/blend.json")
    assert [source.name for source in blend.datasets] == ["chats", "more"]
    assert rows_of(blend.datasets) == local
    parts = sorted((output / "data/chats").glob("part-*.parquet"))
    assert len(parts) > 2
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    written = [{name: value for name, value in row.items() if value is not None} for row in rows]
    assert rows_of([DataSource(name="x", path="hf://org/name", split="chats")]) == written
    assert local[: len(written)] == written


def test_the_card_names_every_file_of_rows_and_nothing_else(hub, outputs):
    commit = send(outputs("harmony"))
    found = {file.uri.split(f"@{commit}/")[1] for file in discover(DataSource(name="x", path="hf://org/name"))}
    assert found == {name for name in hub.datasets["org/name"].files if name.startswith("data/")}


def test_exactly_the_published_files_are_pushed(pushed):
    _, output, _, files = pushed
    manifest = read_manifest(str(output))
    entries = [*manifest["shards"], *manifest.get("derived", {}).get("shards", [])]
    names = {name for entry in entries for of in entry["published"].values() for name in of}
    there = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    expected = there & {f"{name}{ending}" for name in names for ending in ("", ".bin", ".idx")}
    left_out = ("quarantine/", "blend.full-validation", "blend.sequences")  # the last two name places of this machine
    expected |= {file["path"] for file in manifest["files"] if not file["path"].startswith(left_out)}
    assert set(files) == {".gitattributes", "manifest.json", *CARDS, *expected}
    assert expected > {"blend.json"}
    assert any((output / "quarantine").iterdir())
    for name in {*expected, *CARDS} - {"blend.json"}:
        assert files[name] == (output / name).read_bytes(), name


def test_nothing_pushed_names_a_place_of_this_machine(pushed):
    _, output, _, files = pushed
    places = [str(output), str(output.parent), "secret place", "the store", os.uname().nodename]
    for name, content in files.items():
        text = str(pq.read_table(io.BytesIO(content)).to_pydict()).encode() if name.endswith(".parquet") else content
        assert not [place for place in places if place.encode() in text], (name, text)
    manifest = json.loads(files["manifest.json"])
    assert list(manifest["volatile"]) == ["seal"]
    assert {entry["file"] for entry in manifest["shards"]} <= {f"{n}.jsonl" for n in ("chats", "more", "text", "rows")}


def test_local_paths_are_removed_from_texts_and_settings(own, monkeypatch):
    manifest = read_manifest(str(own))
    source = str(own.parent / "secret place")
    written = {
        f"{own}/splits/a.jsonl": "splits/a.jsonl",
        f"{own}/shards/rl/x": "rl/x",
        f"{source}/rows.jsonl:3: bad, see {own}/quarantine": "rows.jsonl:3: bad, see quarantine",
        f"datasets/rows/{source}/rows.jsonl@0": "datasets/rows/rows.jsonl@0",
        "/elsewhere/models/qwen": "qwen",
        "/elsewhere/models/": "models",
        "~/models/qwen": "qwen",
        "file:///elsewhere/a.jinja": "a.jinja",
        **{same: same for same in [f"s3:/{source}/a", f"hf://org/name{source}/a", "a/b", "{% if a %}/b", "", 7]},
    }
    monkeypatch.chdir(own.parent)
    (own.parent / "client/tokenizer").mkdir(parents=True)
    settings = {
        "client/tokenizer": "tokenizer",
        "../client/chat.jinja": "chat.jinja",
        "gone/client/tokenizer/": "tokenizer",
        "/elsewhere/client/tokenizer": "tokenizer",
        **{same: same for same in ["org/name", "nano3", "{% if a/b/c %}", "a/b/c or d", "s3://bucket/a/b"]},
    }
    noted = {"note": [{"text": text} for text in written], "settings": {"several": list(settings)}}
    (own / "manifest.json").write_bytes(sealed({**manifest, **noted}))
    pushed = json.loads(parcel_of(str(own)).documents["manifest.json"])
    assert [each["text"] for each in pushed["note"]] == list(written.values())
    assert pushed["settings"]["several"] == list(settings.values())


def test_shards_elsewhere_are_rejected(hub, tmp_path):
    path = preparing_rl.write_rows(tmp_path / "rows.jsonl", chats(0, 5))
    preparing_rl.prepare(preparing.blend_of(path), tmp_path / "out", store="memory://store")
    assert "is outside" in refusal(lambda: send(tmp_path / "out"))


def test_every_path_of_the_pushed_blend_is_a_file_or_folder_of_the_repository(pushed):
    kind, _, _, files = pushed
    blend = json.loads(files["blend.json"])
    paths = [path for split in blend.values() for path in (split or [])[1::2]]
    if kind == "harmony":
        paths = [source["path"] for source in blend["datasets"]]
    if kind == "rl":
        paths.append(json.loads(files["manifest.json"])["train"])
    assert paths
    for path in paths:
        assert any(name == path or name.startswith((f"{path}/", f"{path}.")) for name in files), path


def test_the_pushed_manifest_is_whole_and_vouches_for_every_file(pushed):
    _, _, commit, files = pushed
    manifest = read_manifest(f"hf://datasets/org/name@{commit}")
    recorded = {file["path"]: file for file in manifest["files"]}
    assert recorded.keys() == files.keys() - {".gitattributes", "manifest.json"}
    for name, file in recorded.items():
        content = files[name]
        assert file["size"] == len(content)
        if name.endswith(".bin"):
            assert len(file["extents"]) > 0
        for size, digest in file.get("extents", [(file["size"], file["xxh3_128"])]):
            assert xxhash.xxh3_128_hexdigest(content[:size]) == digest
            content = content[size:]
        assert content == b""


def test_equal_preparations_are_equal_on_the_hub(hub, tmp_path):
    for name in ("one", "two"):
        send(rl(tmp_path / name), f"org/{name}")
    assert hub.datasets["org/one"].files == hub.datasets["org/two"].files


@pytest.mark.parametrize("public", [False, True])
def test_a_new_repository_is_as_private_as_was_asked_for(hub, outputs, public):
    parcel, target = parcel_of(str(outputs("rl"))), target_of("org/new", public=public)
    commit = push(parcel, target)
    repository = hub.datasets["org/new"]
    assert repository.private is not public
    size = sum(map(len, repository.files.values())) - len(repository.files[".gitattributes"])
    record = {
        "path": f"hf://org/new@{repository.head}",
        "type": "push",
        "commit": repository.head,
        "private": not public,
    }
    assert push_record(parcel, target, commit) == {
        "push": {**record, "files": len(repository.files) - 1, "bytes": size}
    }


@pytest.mark.parametrize(("private", "remedy"), [(False, "--public"), (True, "remove --public")])
def test_wrong_visibility_is_rejected_before_uploading(hub, outputs, private, remedy):
    hub.create("org/name", private=private)
    said = refusal(lambda: send(outputs("rl"), public=private))
    assert "hf://org/name" in said
    assert remedy in said
    assert writes(hub) == 0
    assert hub.datasets["org/name"].private is private
    send(outputs("rl"), public=not private)
    assert hub.datasets["org/name"].private is private


@pytest.mark.parametrize(("asked", "made"), [(False, "public"), (True, "private")])
def test_new_repository_visibility_is_checked(hub, outputs, asked, made):
    hub.visible_when_created = made
    assert f"is {made}" in refusal(lambda: send(outputs("rl"), public=asked))
    assert hub.writes == {"create": 1}
    assert list(hub.datasets["org/name"].files) == [".gitattributes"]


def test_second_push_does_not_commit(hub, outputs):
    first = send(outputs("rl"))
    received, commits = hub.received, len(hub.datasets["org/name"].commits)
    assert send(outputs("rl")) == first
    assert hub.received == received
    assert len(hub.datasets["org/name"].commits) == commits == 2


@pytest.mark.parametrize("kind", ["preupload", "batch", "put", "commit"])
def test_a_push_that_the_hub_broke_is_finished_by_the_next_without_sending_twice(hub, outputs, kind):
    hub.failures[kind] = [503] * 500
    said = refusal(lambda: send(outputs("rl")), RunError)
    assert "503" in said
    assert "push again" in said
    assert list(hub.datasets["org/name"].files) == [".gitattributes"]
    hub.failures.clear()
    send(outputs("rl"))
    assert hub.received == size(hub.datasets["org/name"].files)


@pytest.mark.parametrize("kind", ["preupload", "batch", "put"])
def test_a_hub_that_is_busy_for_a_moment_is_asked_again(hub, outputs, kind):
    hub.failures[kind] = [429, 503]
    send(outputs("rl"))
    assert "manifest.json" in hub.datasets["org/name"].files


def test_next_version_replaces_only_the_last_push(hub, tmp_path):
    hub.create("org/name", files={"train/mine.jsonl": b"x", "LICENSE": b"y"})
    send(rl(tmp_path / "one"))
    repository = hub.datasets["org/name"]
    removed = next(name for name in repository.files if name.startswith("train/data_"))
    repository.commit_files({name: content for name, content in repository.files.items() if name != removed})
    before = set(repository.files)
    output = rl(tmp_path / "two", chats(500, 510))
    parcel, target = parcel_of(str(output)), target_of("org/name", public=False)
    stale = stale_names(parcel, target)
    push(parcel, target)
    after = set(repository.files)
    assert set(stale) == before - after
    assert any(name.startswith("train/data_") for name in stale)
    assert after == {*parcel.sizes, ".gitattributes", "train/mine.jsonl", "LICENSE"}


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"no json", b'{"files": [{"path": "LICENSE"}], "volatile": {}}'])
def test_foreign_manifest_does_not_remove_files(hub, outputs, content):
    hub.create("org/name", files={"manifest.json": content, "LICENSE": b"y"})
    send(outputs("rl"))
    assert "LICENSE" in hub.datasets["org/name"].files


def test_many_files_take_several_commits_and_only_the_last_one_looks_complete(hub, outputs, monkeypatch):
    monkeypatch.setattr(pushing, "MOST_FILES", 3)
    commit = send(outputs("rl"))
    repository = hub.datasets["org/name"]
    *parts, last = list(repository.commits.values())[1:]
    assert len(parts) > 1
    assert not any({"manifest.json", "blend.json", "README.md"} & part.keys() for part in parts)
    assert {"manifest.json", "blend.json", "README.md"} < last.keys()
    sizes = [len(after) - len(before) for before, after in zip([{".gitattributes"}, *parts], parts, strict=False)]
    assert set(sizes) == {3}
    assert set(last) == {".gitattributes", *parcel_of(str(outputs("rl"))).sizes}
    assert commit == repository.head


def test_small_files_take_several_commits_by_their_size(hub, outputs, monkeypatch):
    parcel = parcel_of(str(outputs("rl")))
    shards = [size for name, size in parcel.sizes.items() if name.startswith("train/")]
    monkeypatch.setattr(pushing, "MOST_BYTES", 3 * max(shards))
    send(outputs("rl"))
    commits = list(hub.datasets["org/name"].commits.values())
    added = [[parcel.sizes[name] for name in after.keys() - before] for before, after in itertools.pairwise(commits)]
    assert len(added) > 3
    assert all(sum(sizes) <= 3 * max(shards) or len(sizes) == 1 for sizes in added[:-1])
    assert all(sum(one) + sum(other) > 3 * max(shards) for one, other in itertools.pairwise(added))
    monkeypatch.setattr(pushing, "LARGE", 0)  # what is large is not part of a commit
    send(outputs("rl"), "org/other")
    assert len(hub.datasets["org/other"].messages) == 2


def pushed_rows(commit):
    return rows_of(load_blend(f"hf://datasets/org/name@{commit}/blend.json").datasets)


def published_rows(output):
    return rows_of(load_blend(str(output / "blend.json")).datasets)


def break_off(hub, output, commits=1):
    """Push no more than the first commits."""
    hub.failures["commit"] = [*[None] * commits, 500]
    refusal(lambda: send(output), RunError)


@pytest.mark.parametrize(("first", "second"), [("harmony", "rl"), ("rl", "harmony")])
def test_broken_push_keeps_foreign_files(hub, outputs, monkeypatch, first, second):
    monkeypatch.setattr(pushing, "MOST_FILES", 3)
    theirs = {"data/chats/mine.parquet": b"x", "train/mine_1.jsonl": b"x", "data/part-00000-1234abcd.parquet": b"x"}
    repository = hub.create("org/name", files=theirs)
    break_off(hub, outputs(first))
    send(outputs(second))
    assert theirs.items() <= repository.files.items()


@pytest.mark.slow
def test_partial_pushes_cannot_be_read(hub, outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(pushing, "MOST_FILES", 3)
    send(outputs("harmony"))
    repository = hub.datasets["org/name"]
    break_off(hub, harmony(tmp_path / "broken", 500))
    assert "manifest.json" in repository.files
    assert not {"blend.json", "README.md"} & repository.files.keys()
    assert "no such blend file" in refusal(lambda: pushed_rows(repository.head))
    third = harmony(tmp_path / "third", 900)
    commit = send(third)
    assert set(repository.files) == {".gitattributes", *parcel_of(str(third)).sizes}
    assert len(published_rows(third)) == 45
    assert pushed_rows(commit) == published_rows(third)


@pytest.mark.slow
def test_push_interrupted_over_an_older_one_resumes(hub, outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(pushing, "MOST_FILES", 3)
    send(outputs("harmony"))
    repository = hub.datasets["org/name"]
    before, other = len(repository.messages), harmony(tmp_path, 500)
    break_off(hub, other, 2)
    commit = send(other)
    received, commits = hub.received, len(repository.messages)
    assert pushed_rows(commit) == published_rows(other)
    assert send(other) == commit
    assert (hub.received, len(repository.messages)) == (received, commits)
    send(other, "org/new")
    assert commits - before == len(hub.datasets["org/new"].messages) - 1  # one made the repository


def test_foreign_card_is_always_kept(hub, outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(pushing, "MOST_FILES", 3)
    repository = hub.create("org/name", files={"README.md": b"mine"})
    assert run(["push", str(outputs("rl")), "org/name"]) == 0
    assert run(["push", str(rl(tmp_path, chats(500, 540))), "org/name"]) == 0
    assert "README.md" not in {file["path"] for file in json.loads(repository.files["manifest.json"])["files"]}
    assert all(files["README.md"] == b"mine" for files in repository.commits.values())


def test_pushed_card_is_replaced_with_the_last_commit(hub, outputs, monkeypatch):
    monkeypatch.setattr(pushing, "MOST_FILES", 3)
    send(outputs("harmony"))
    repository = hub.datasets["org/name"]
    before = set(repository.commits)
    send(outputs("rl"))
    *parts, last = [files for commit, files in repository.commits.items() if commit not in before]
    assert not any("README.md" in files for files in parts)
    assert last["README.md"] == parcel_of(str(outputs("rl"))).documents["README.md"]


def test_concurrent_commit_is_reported(hub, outputs):
    repository = hub.create("org/name")
    parcel, target = parcel_of(str(outputs("rl"))), target_of("org/name", public=False)
    repository.commit_files({**repository.files, "theirs.txt": b"x"})
    assert "push again" in refusal(lambda: push(parcel, target), RunError)
    assert "manifest.json" not in repository.files
    send(outputs("rl"))
    assert {"theirs.txt", "manifest.json"} < repository.files.keys()


@pytest.mark.parametrize("before", [False, True])
def test_files_ignored_by_the_hub_are_reported(hub, outputs, tmp_path, before):
    if before:  # it keeps an older version
        send(rl(tmp_path, chats(500, 510)))
    repository = hub.datasets["org/name"] if before else hub.create("org/name")
    repository.ignored = ["manifest.json" if before else "train/*"]
    said = refusal(lambda: send(outputs("rl")), RunError)
    assert all(words in said for words in (["manifest.json"] if before else ["skipped", ".gitignore"]))


def damaged(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replaced(path, content):
    """Another file in place of a link."""
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/data_*", damaged),
        ("train/data_*", lambda path: replaced(path, path.read_bytes()[:-1])),
        ("train/data_*", Path.unlink),
        ("train/data_*", lambda path: replaced(path, path.read_bytes()[:-1] + b"\0")),
        ("splits/train_*", damaged),
        ("splits/train_*", Path.unlink),
        ("blend.json", damaged),
        ("shards/rl/*/receipt.json", Path.unlink),
        ("shards/rl/*/receipt.json", damaged),
    ],
)
def test_damaged_output_is_rejected_before_uploading(hub, own, name, damage):
    damage(next(own.glob(name)))
    assert "run the preparation again" in refusal(lambda: send(own), RunError)
    assert writes(hub) == 0


def test_partial_output_is_rejected(hub, tmp_path):
    path = preparing_rl.write_rows(tmp_path / "rows.jsonl", chats(0, 40))
    planned = preparing_rl.plan(preparing.blend_of(path), tmp_path / "out", shard_size=1500, allow_partial=True)
    preparing_rl.build(planned, planned.plan.pending[1:])
    publish_here("rl", planned)
    said = refusal(lambda: send(tmp_path / "out"))
    assert "1 planned shards are missing" in said
    assert writes(hub) == 0


def test_non_preparations_cannot_be_pushed(hub, own, tmp_path):
    assert "no manifest.json" in refusal(lambda: send(tmp_path))
    assert "local" in refusal(lambda: send("s3://bucket/out"))
    damaged(own / "manifest.json")
    assert "manifest.json" in refusal(lambda: send(own))


def test_downloaded_copy_is_not_a_preparation(hub, outputs, tmp_path):
    send(outputs("rl"))
    for name, content in hub.datasets["org/name"].files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert "a copy without its shards" in refusal(lambda: send(tmp_path))


def test_moved_output_is_rejected(hub, own, tmp_path):
    moved = own.rename(tmp_path / "moved")
    own.mkdir()
    (moved / "shards").rename(own / "shards")
    assert str(own) in refusal(lambda: send(moved))
    assert writes(hub) == 0


ANSWERS = {
    401: (InputError, ["HF_TOKEN", "renew"]),
    403: (InputError, ["may not write", "token"]),
    404: (InputError, ["organization"]),
    409: (RunError, ["push again"]),
    400: (RunError, ["400", "injected into commit"]),
    413: (RunError, ["413"]),
    429: (RunError, ["too many requests", "push again"]),
    500: (RunError, ["500", "push again"]),
}


@pytest.mark.parametrize("status", ANSWERS)
@pytest.mark.parametrize("kind", ["create", "commit"])
def test_hub_rejections_name_a_remedy(hub, outputs, kind, status):
    error, parts = ANSWERS[status]
    hub.failures[kind] = [status]
    said = refusal(lambda: send(outputs("rl")), error)
    assert said.startswith("hf://org/name: ")
    assert hub.url not in said
    assert "\n" not in said
    assert all(part.replace("commit", kind) in said for part in parts), said


def test_rejected_upload_in_a_thread_is_reported(hub, outputs):
    hub.failures["put"] = [403] * 9
    assert "injected into put" in refusal(lambda: send(outputs("rl")))


def test_tokens_are_looked_at_before_anything(hub, outputs, monkeypatch):
    for token in (EXPIRED, "hf_of_nobody"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert "renew" in refusal(lambda: target_of("org/name", public=False))
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in refusal(lambda: send(outputs("rl")))
    monkeypatch.setenv("HF_TOKEN", READER)
    assert "may not write" in refusal(lambda: send(outputs("rl")))
    assert writes(hub) == 0
    assert hub.datasets == {}


@pytest.mark.parametrize("name", ["name", "org/name/more", "hf://org/name", "/name", "org/", "org/na me", "org/na--me"])
def test_invalid_names_are_rejected(hub, outputs, name):
    assert name in refusal(lambda: send(outputs("rl"), name))
    assert writes(hub) == 0


def test_unreachable_hub_is_reported(hub, outputs, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "HF_ENDPOINT" in refusal(lambda: send(outputs("rl")), RunError)


def test_the_command_prints_one_line_of_json_and_pushes(hub, outputs, capsys):
    assert run(["push", str(outputs("rl")), "org/name"]) == 0
    printed = capsys.readouterr()
    (record,) = map(json.loads, printed.out.splitlines())
    head = hub.datasets["org/name"].head
    assert (record["push"]["commit"], record["push"]["private"]) == (head, True)
    assert f"hf://org/name@{head}" in printed.err
    assert run(["push", str(outputs("rl")), "org/name", "--public"]) == 2
    assert "--public" in capsys.readouterr().err
    assert WRITER not in printed.out + printed.err


def test_push_dry_run_lists_all_files(hub, outputs, capsys):
    output = outputs("rl")
    assert run(["push", str(output), "org/name", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert writes(hub) == 0
    assert hub.datasets == {}
    assert "would be created, private" in printed.err
    for name, size in parcel_of(str(output)).sizes.items():
        assert f"{size:,}  {name}" in printed.err
    record = json.loads(printed.out)["push"]
    assert (record["path"], record["commit"], record["private"]) == ("hf://org/name", None, True)
    send(output)
    done = json.loads(capsys.readouterr().out or "{}")
    assert done == {}
    assert record["files"] == len(hub.datasets["org/name"].files) - 1


def test_push_dry_run_names_removals_and_errors(hub, outputs, tmp_path, capsys):
    send(rl(tmp_path / "one", chats(700, 720)))
    count = writes(hub)
    assert run(["push", str(outputs("rl")), "org/name", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "remove  train/data_" in said
    assert "which is private" in said
    assert run(["push", str(outputs("rl")), "org/name", "--dry-run", "--public"]) == 2
    assert writes(hub) == count


def test_the_folder_of_a_push_is_left_as_it_was(hub, own):
    before = {path: path.read_bytes() for path in Path(own).rglob("*") if path.is_file()}
    send(own)
    assert {path: path.read_bytes() for path in Path(own).rglob("*") if path.is_file()} == before
