"""Names and versions of what was made, found again wherever a place is read; and the lineage back to datasets."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenmill.flows.cli import run
from tokenmill.tasks.artifact import Artifact, MadeFrom, read_artifact
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.registry import artifact_in, lineage, register
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import absolute, located
from tokenmill.tasks.train.prepared import prepared_data

from tests.flaky_storage import flaky_server, used_here
from tests.preparing import blend_of, prepare, write_lines


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_ARTIFACTS", str(tmp_path / "names"))
    return tmp_path / "names"


@pytest.fixture
def prepared(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["some text", "and more"])
    prepare(blend_of(path), tmp_path / "out", tokenizer={"model": "cl100k_base"})
    return tmp_path / "out"


def artifact(path, **facts):
    return Artifact(path=str(path), type="pretrain", **facts)


def test_versions_count_up_and_the_newest_is_the_latest(root):
    assert [register("corpus", artifact(place)).version for place in ("/a", "/b", "/c")] == ["v1", "v2", "v3"]
    assert [located(f"art://corpus{version}") for version in ("", ":latest", ":v1", ":v2")] == ["/c", "/c", "/a", "/b"]
    assert located("art://corpus:v2/blend.json") == absolute("art://corpus:v2/blend.json") == "/b/blend.json"


def test_unchanged_content_keeps_its_version():
    assert register("corpus", artifact("/a", tokens=1)).version == "v1"
    assert register("corpus", artifact("/a", tokens=1)).version == "v1"
    assert register("corpus", artifact("/a", tokens=2)).version == "v2"


def test_no_bit_of_a_record_leads_elsewhere(root):
    register("corpus", artifact("/a"))
    place = root / "corpus/v1.json"
    whole = place.read_bytes()
    for number in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[number // 8] ^= 1 << number % 8
        place.write_bytes(damaged)
        with pytest.raises(InputError, match=r"corpus: the record .*v1\.json is damaged .*register the folder again"):
            located("art://corpus")
    assert register("corpus", artifact("/a")).version == "v2"
    assert located("art://corpus") == "/a"


@pytest.fixture(params=["disk", "store"])
def shared(request, monkeypatch, tmp_path):
    """Names where others can reach them too; requests to the store fail now and then, some of them after they were served."""
    if request.param == "disk":
        yield
        return
    with flaky_server() as server, used_here(server):
        monkeypatch.setenv("TOKENMILL_ARTIFACTS", server.bucket(tmp_path.name.replace("_", "-")))
        server.faults.clear(rate=0.2, seed=1)
        yield
        assert server.faults.counts["unsaid"]


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_concurrent_registrations_get_separate_versions():
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda place: register("corpus", artifact(place)), map(str, range(8))))
    assert sorted(registered.version for registered in found) == [f"v{number}" for number in range(1, 9)]
    for registered in found:
        assert located(registered.reference) == registered.artifact.path
    newest = max(found, key=lambda registered: registered.version)
    assert located("art://corpus") == newest.artifact.path
    assert register("corpus", newest.artifact).version == newest.version


@pytest.mark.parametrize(
    ("use", "words"),
    [
        *(
            (lambda name=name: register(name, artifact("/a")), "a name is letters")
            for name in ("", "a/b", "../a", ".hidden", "a b", "x" * 129)
        ),
        (lambda: located("art://corpse"), "register it with"),
        (lambda: located("art://corpus:v7"), "register it with"),
        (lambda: located("art://corpus:v7/blend.json"), "register it with"),
        (lambda: publish_bytes("art://corpus/file", b""), "cannot publish"),
    ],
)
def test_missing_or_invalid_name_gives_the_remedy(use, words):
    register("corpus", artifact("/a"))
    with pytest.raises(InputError, match=words):
        use()


@pytest.mark.slow
def test_name_replaces_its_folder_everywhere(prepared):
    register("corpus", artifact_in(str(prepared)))
    assert read_manifest("art://corpus") == read_manifest(str(prepared))
    blend = load_blend({"datasets": [{"name": "a", "path": "art://corpus/train"}]})
    assert [source.path for source in blend.datasets or []] == [str(prepared / "train")]
    assert run(["verify", "art://corpus"]) == 0


@pytest.mark.slow
def test_lineage_of_results_reaches_the_datasets(tmp_path, prepared):
    model, results = tmp_path / "model", tmp_path / "results"
    data = prepared_data(str(prepared)).made_from
    source = {"type": "pretrain", "path": str(prepared), "digest": data}
    publish_bytes(str(model / "training.json"), sealed({"type": "model", "made_from": [source], "volatile": {}}))
    found = {"type": "results", "model": f"{model}/model", "data": str(prepared), "volatile": {}}
    found["made_from"] = {"model": "xxh3_128:1", "data": data}
    publish_bytes(str(results / "results.json"), sealed(found))
    register("results", artifact_in(str(results)))
    data = {"type": "data", "path": f"{tmp_path}/a.jsonl", "made_from": []}
    there = {"type": "pretrain", "path": str(prepared), "made_from": [data]}
    above = {"type": "model", "path": str(model)}
    expected = {"type": "results", "path": str(results), "made_from": [{**above, "made_from": [there]}, there]}
    assert lineage("art://results") == expected
    prepare_other_data(tmp_path)
    changed = there | {"changed": True}
    assert lineage("art://results")["made_from"] == [{**above, "made_from": [changed]}, changed]


def prepare_other_data(folder):
    """Other data of the same name, into the same folder."""
    path = write_lines(folder / "a.jsonl", ["some text", "and more", "and more of it"])
    prepare(blend_of(path), folder / "out", tokenizer={"model": "cl100k_base"})


def test_second_preparation_in_a_folder_is_a_new_version(tmp_path, prepared, capsys):
    assert register("corpus", artifact_in(str(prepared))).version == "v1"
    path = str(tmp_path / "a.jsonl")
    prepare(blend_of(path), prepared, tokenizer={"model": "cl100k_base"})
    assert register("corpus", artifact_in(str(prepared))).version == "v1", "the same once more"
    assert "changed" not in lineage("art://corpus")
    prepare_other_data(tmp_path)
    assert lineage("art://corpus")["changed"]
    assert register("corpus", artifact_in(str(prepared))).version == "v2"
    assert "changed" not in lineage("art://corpus:v2")
    assert run(["lineage", "art://corpus:v1"]) == 0
    assert "changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"a": 1}', b'{"a": {}, "b": {}}', b'{"a": {"path": "", "type": "x"}}', b"\xff"]
)
def test_non_artifacts_are_rejected(line):
    with pytest.raises(InputError, match="doesn't contain an artifact record"):
        read_artifact(line, set(), "train")


def test_artifact_of_the_wrong_type_is_rejected():
    line = b'{"harmony": {"path": "/x", "type": "harmony", "made_from": [{"type": "data", "path": "y"}], "rows": 3}}'
    assert read_artifact(line, {"harmony"}, "score").made_from == [MadeFrom(type="data", path="y")]
    with pytest.raises(InputError, match="of type pretrain or sft, but stdin holds 'harmony'"):
        read_artifact(line, {"sft", "pretrain"}, "train")


def test_data_that_is_called_like_our_records_is_data(tmp_path):
    source = tmp_path / "rows"
    source.mkdir()
    (source / "training.json").write_text('[{"text": "one"}, {"text": "two"}]')
    prepare(blend_of(str(source)), tmp_path / "out", tokenizer={"model": "cl100k_base"})
    (source / "results.json").write_text('{"type": "results", "volatile": {}}')
    (from_it,) = lineage(str(tmp_path / "out"))["made_from"]
    assert from_it == {"type": "data", "path": str(source), "made_from": []}
    with pytest.raises(InputError, match="not a tokenmill output folder"):
        artifact_in(str(source))


def test_data_beside_a_run_that_failed_is_data(tmp_path, prepared):
    manifest = json.loads((prepared / "manifest.json").read_bytes())
    write_lines(tmp_path / "failed/rows.jsonl", ["some text"])
    prepare(blend_of(str(tmp_path / "failed")), tmp_path / "next", tokenizer={"model": "cl100k_base"})
    (tmp_path / "failed/manifest.json").write_bytes(sealed({**manifest, "status": "failed", "error": "no space"}))
    (from_it,) = lineage(str(tmp_path / "next"))["made_from"]
    assert from_it["made_from"] == []
