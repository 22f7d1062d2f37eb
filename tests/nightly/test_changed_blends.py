"""Nights prepare what changed, say why, and touch nothing else."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from tokenmill.tasks.artifact import read_artifact
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.nightly.blends import find_blends
from tokenmill.tasks.nightly.night import compare_blend, follow_prepared, store_of
from tokenmill.tasks.report.summary import artifact_record
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.sources import parquet, slices
from tokenmill.tasks.tokenize.kind import PRETRAIN

from tests import preparing_harmony
from tests.forking import in_processes
from tests.nightly.nights import (
    BOOKS,
    FIRST,
    NEWS,
    SECOND,
    SHARD_SIZE,
    THIRD,
    WEB,
    Nights,
    at,
    texts,
    whereabouts,
    write,
)
from tests.preparing import tree, write_lines
from tests.preparing_sft import write_rows


@pytest.fixture(scope="module")
def first_night(tmp_path_factory):
    """A first night's output, to be copied."""
    nights = Nights(tmp_path_factory.mktemp("first"))
    nights.run(FIRST)
    return nights


@pytest.fixture
def nights(first_night):
    """The evening after the first night; what a test changes is put back, because plans go by paths."""
    kept = first_night.folder.with_name("kept")
    shutil.copytree(first_night.folder, kept, copy_function=os.link)
    for path in [*(kept / "data").rglob("*.jsonl"), *(kept / "blends").rglob("*.*")]:
        content, status = path.read_bytes(), path.stat()  # written in place by tests, so links would not do
        path.unlink()
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    yield first_night
    shutil.rmtree(first_night.folder)
    kept.rename(first_night.folder)


def test_a_first_night_publishes_every_blend_and_each_shared_shard_is_built_once(nights):
    manifests = {
        name: json.loads(Path(nights.latest(name)["path"], "manifest.json").read_bytes()) for name in (NEWS, WEB, BOOKS)
    }
    assert {name: nights.versions(name) for name in manifests} == {name: [FIRST] for name in manifests}
    used = [entry["key"] for manifest in manifests.values() for entry in manifest["shards"]]
    built = sum(manifest["volatile"]["shards"]["built"] for manifest in manifests.values())
    assert built == len(set(used)) == len(nights.receipts()) < len(used)
    assert all("nothing was published before" in nights.latest(name)["reasons"][0] for name in manifests)


def test_appended_file_builds_new_slices_once(nights):
    before, untouched = nights.receipts(), whereabouts(f"{nights.out}/{BOOKS}")
    file = nights.data / "recent/first.jsonl"
    old_size = file.stat().st_size
    nights.append("recent", texts("later", 70))
    new_size = file.stat().st_size
    made = nights.run(SECOND)
    assert set(made) == {NEWS, WEB}
    slices = -(-new_size // SHARD_SIZE) - old_size // SHARD_SIZE
    assert slices > 3
    new = {key: receipt for key, receipt in nights.receipts().items() if key not in before}
    assert len(new) == slices
    assert [manifest["volatile"]["shards"]["built"] for manifest in made.values()] == [slices, 0]
    new_rows = sum(receipt.rows_in for receipt in new.values())
    kept_rows = sum(entry["rows"] for entry in made[WEB]["shards"] if entry["dataset"] == "recent") - new_rows
    assert kept_rows + new_rows == 120
    assert whereabouts(f"{nights.out}/{BOOKS}") == untouched
    for name in (NEWS, WEB):
        assert nights.latest(name)["reasons"] == [
            f"recent: 1 grown (first.jsonl: {old_size / 1e3:.1f} kB -> {new_size / 1e3:.1f} kB)"
        ]
        assert nights.versions(name) == [FIRST, SECOND]
        assert (nights.latest(name)["version"], nights.latest(name)["before"]) == (SECOND, FIRST)
    for name, version in ((NEWS, FIRST), (NEWS, SECOND), (WEB, FIRST), (WEB, SECOND), (BOOKS, FIRST)):
        assert verify(f"{nights.out}/{name}/{version}", PRETRAIN.inspect).problems == []


def test_version_equals_a_fresh_preparation(nights, tmp_path):
    nights.append("recent", texts("later", 70))
    nights.run(SECOND)
    alone = Nights.__new__(Nights)
    alone.__dict__ |= nights.__dict__ | {"out": str(tmp_path / "alone")}
    alone.run(SECOND)
    one, other = (Path(out) / NEWS / SECOND for out in (nights.out, alone.out))
    assert tree(one) == tree(other)


def test_unchanged_night_does_not_read_data_or_write_files(nights, monkeypatch):
    nights.compare(FIRST)  # the data was put back, which is looked into once
    for module in (parquet, slices):
        monkeypatch.setattr(module, "open_source", refuse)
    for receipt in Path(store_of(nights.out)).glob("*/*/receipt.json"):
        receipt.unlink()
        receipt.mkdir()  # which cannot be read
    before = whereabouts(nights.out)
    assert [compared.reasons for compared in nights.compare(SECOND).values()] == [[], [], []]
    assert whereabouts(nights.out) == before
    nights.append("common", ["a new row"])
    with pytest.raises(AssertionError, match=r"common/first\.jsonl"):
        nights.compare(SECOND)


def test_touched_files_are_unchanged_and_small_growth_is_in_bytes(nights):
    for file in nights.data.rglob("*.jsonl"):
        os.utime(file, (1_500_000_000, 1_500_000_000))
    assert nights.run(SECOND) == {}
    size = (nights.data / "common/first.jsonl").stat().st_size
    with (nights.data / "common/first.jsonl").open("ab") as file:
        file.write(b'{"text":""}\n')
    assert f"common: 1 grown (first.jsonl: {size:,} -> {size + 12:,} bytes)" in nights.compare(SECOND)[WEB].reasons


def refuse(file):
    raise AssertionError(file.uri)


def test_added_removed_shrunk_and_rewritten_files_are_distinguished(nights):
    nights.append("recent", texts("more", 3), file="second")
    nights.append("recent", texts("more", 3), file="third")
    nights.run(SECOND)
    old = nights.data / "recent"
    (old / "third.jsonl").unlink()
    write(old / "fourth.jsonl", texts("new", 2))
    write(old / "second.jsonl", texts("lore", 3))
    sizes = (old / "first.jsonl").stat().st_size, write(old / "first.jsonl", texts("recent", 2)).stat().st_size
    shrunk = f"1 shrunk (first.jsonl: {sizes[0] / 1e3:.1f} kB -> {sizes[1]} bytes)"
    (reason,) = nights.compare(THIRD)[WEB].reasons
    assert reason == f"recent: 1 file new (fourth.jsonl), {shrunk}, 1 changed (second.jsonl), 1 gone (third.jsonl)"


def test_new_cut_is_a_settings_change(nights):
    nights.settings("web", shard_size=1500)
    assert nights.compare(SECOND)[WEB].reasons == [f"settings: shard_size {SHARD_SIZE} -> 1500"]


def test_a_changed_setting_or_weight_is_named_and_other_blends_keep_theirs(nights):
    nights.settings("web", holdout={"valid": 0.25})
    nights.blend("news", "common", "recent", recent=3.0)
    before = nights.receipts().keys()
    made = nights.run(SECOND)
    assert set(made) == {NEWS, WEB}
    shards = made[WEB]["shards"]
    assert nights.latest(WEB)["reasons"] == [
        "settings: holdout.valid 0.1 -> 0.25", f"{len(shards)} shards: recipe.holdout_valid changed: 0.1 -> 0.25",
    ]  # fmt: skip
    assert made[WEB]["settings"]["shard_size"] == SHARD_SIZE, "the defaults of the folder hold for the rest"
    assert nights.latest(NEWS)["reasons"] == ["recent: weight 1.0 -> 3.0"]
    assert nights.receipts().keys() - before == {entry["key"] for entry in shards}, "a weight makes none"


def test_added_removed_or_reordered_datasets_are_named(nights):
    nights.blend("news", "common", "old")
    nights.blend("web", "recent", "common")
    reasons = {name: compared.reasons for name, compared in nights.compare(SECOND).items()}
    assert reasons[NEWS] == ["recent: the dataset is gone", "old: the dataset is new"]
    assert reasons[WEB] == ["the order of the datasets changed"]
    assert reasons[BOOKS] == []


def test_changed_tokenizer_with_the_same_name_is_noticed(nights):
    file = nights.folder / "vocabulary/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**tokenizer, "normalizer": {**tokenizer["normalizer"], "lowercase": False}}))
    (reason,) = nights.compare(SECOND)[BOOKS].reasons
    shards, said = reason.split(": ", 1)
    assert (
        shards
        == f"{len(json.loads(Path(nights.latest(BOOKS)['path'], 'manifest.json').read_bytes())['shards'])} shards"
    )
    assert said.startswith("recipe.tokenizer ")


def test_a_version_that_somebody_removed_is_published_anew(nights):
    shutil.rmtree(f"{nights.out}/{WEB}/{FIRST}")
    assert set(nights.run(FIRST)) == {WEB}
    assert nights.latest(WEB)["reasons"] == [f"the latest version, {FIRST}, is no longer there"]
    assert nights.latest(WEB)["version"] == f"{FIRST}.2"


def test_a_night_killed_before_readers_were_led_to_its_version_is_repeated_beside_it(nights):
    latest = Path(nights.out, WEB, "latest.json")
    before = latest.read_bytes()
    nights.append("recent", texts("later", 70))
    nights.run(SECOND)
    latest.write_bytes(before)
    made = nights.run(SECOND)
    assert made[WEB]["volatile"]["shards"]["built"] == 0
    assert nights.latest(WEB)["version"] == f"{SECOND}.2"
    assert verify(nights.latest(WEB)["path"], PRETRAIN.inspect).problems == []


def test_shrunk_dataset_is_not_published_until_allowed(nights):
    write(nights.data / "old/first.jsonl", texts("old", 15))
    with pytest.raises(RunError, match=f"dataset 'old': 15 documents, 62% fewer than the 40 .*{BOOKS}/{FIRST}"):
        nights.run(SECOND)
    assert nights.latest(BOOKS)["version"] == FIRST
    assert not Path(nights.out, BOOKS, SECOND, "blend.json").exists()
    nights.settings("books", allow_shrink=["old"])
    assert list(nights.run(THIRD)) == [BOOKS]
    assert nights.latest(BOOKS)["version"] == THIRD
    assert nights.run(THIRD) == {}
    nights.settings("books", allow_shrink=[])
    assert nights.run(THIRD) == {}, "what may be published is no reason for a version"


def test_the_latest_version_can_be_piped_into_the_next_command(nights):
    artifact = read_artifact(Path(nights.out, WEB, "latest.json").read_bytes(), ["pretrain"], "train")
    assert artifact.path == f"{nights.out}/{WEB}/{FIRST}"
    assert {source.path for source in artifact.made_from} == {str(nights.data / name) for name in ("common", "recent")}


@pytest.mark.slow
def test_two_nights_at_once_take_turns_and_make_one_version(nights):
    nights.append("recent", texts("later", 70))
    logs = [nights.folder / f"night-{number}" for number in range(2)]

    def night(log):
        made = nights.run(SECOND)
        log.write_text(json.dumps({name: manifest["volatile"]["shards"]["built"] for name, manifest in made.items()}))

    for _ in in_processes(*(lambda log=log: night(log) for log in logs)):
        pass
    made = sorted((json.loads(log.read_text()) for log in logs), key=len)
    assert made[0] == {}
    assert set(made[1]) == {NEWS, WEB}
    assert nights.versions(NEWS) == nights.versions(WEB) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("pretrain/broken.json", "{", "not valid JSON"),
        ("pretrian/typo.json", "{}", "did you mean 'pretrain'?"),
        ("lost.json", "{}", "isn't a preparation kind"),
        ("pretrain/wbe.yaml", "{}", "did you mean 'web.json'?"),
        ("pretrain/news/local.json", "{}", "isn't a preparation kind"),
        ("pretrain/web.yml", "{}", "web.yml: settings are read from files that end in .yaml"),
        ("pretrain/wbe.yml", "{}", "wbe.yml: settings are read from files that end in .yaml"),
        ("pretrain/web.yaml", "shard_sise: 3", "did you mean 'shard_size'"),
        ("pretrain/web.yaml", "store: /elsewhere", "remove 'store' from"),
        ("pretrain/web.yaml", "previous: /elsewhere", "remove 'previous' from"),
        ("pretrain/web.yaml", "- 1", "must hold a mapping"),
        ("pretrain/web.yaml", "a: [", "not valid YAML"),
    ],
)  # fmt: skip
def test_unpreparable_blend_fails_by_name(nights, name, content, said):
    path = nights.blends / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    (nights.blends / "pretrain/.hidden.json").write_text("{")
    assert len(find_blends(str(nights.blends))) == 4 - name.startswith("pretrain/web.")
    (blend,) = (blend for blend in find_blends(str(nights.blends)) if blend.name == name.rpartition(".")[0])
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        compare_blend(blend, nights.out, {}, at(SECOND))


def test_missing_common_requirements_are_named(nights, tmp_path):
    with pytest.raises(InputError, match="no blends here"):
        find_blends(str(tmp_path))
    latest = Path(nights.out, WEB, "latest.json")
    latest.write_text('{"pretrain": {}}')
    with pytest.raises(InputError, match=r"web/latest\.json: does not name a version; remove it"):
        nights.compare(SECOND)
    (nights.blends / "pretrain/defaults.yml").write_text("shard_size: 3")
    for blend in find_blends(str(nights.blends)):
        with pytest.raises(InputError, match=r"defaults\.yml: settings are read from files that end in \.yaml"):
            compare_blend(blend, nights.out, {}, at(SECOND))


@pytest.mark.slow
def test_harmony_is_up_to_date_until_pools_or_evaluations_change(tmp_path):
    talks = [
        {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": "yes"}]}
        for n in range(20)
    ]
    os.utime(write_rows(tmp_path / "chat.jsonl", talks), (1_000_000_000, 1_000_000_000))
    pools, exam = tmp_path / "pools.yaml", write_rows(tmp_path / "exam.jsonl", [{"text": "who is it? " * 20}])
    pools.write_text("pools: [{name: all, description: all, predicate: stats_token_len > 0}]")
    settings = {
        "max_bad_row_fraction": 1.0, "selection": {"pools": str(pools), "view": "none"},
        "dedup": {"evaluations": {"datasets": [{"name": "exam", "path": str(exam)}]}},
    }  # fmt: skip
    source = {"name": "chat", "path": str(tmp_path / "chat.jsonl"), "converter": "openai_messages"}
    write_lines(tmp_path / "blends/harmony/chat.yaml", [yaml.safe_dump(settings).encode()])
    write_lines(tmp_path / "blends/harmony/chat.json", [json.dumps({"datasets": [source]}).encode()])
    (blend,) = find_blends(str(tmp_path / "blends"))

    def compare():
        return compare_blend(blend, str(tmp_path / "out"), {}, at(FIRST))

    compared = compare()
    _, manifest = preparing_harmony.prepare(blend.path, compared.path, **compared.chosen)
    follow_prepared(compared, artifact_record(manifest, compared.path))
    assert compare().reasons == []
    pools.write_text(pools.read_text().replace("> 0", "> 1"))
    assert compare().reasons == ["selection.pools: the files it names changed"]
    write_rows(exam, [{"text": "who was it? " * 20}])
    changed = [f"{name}: the files it names changed" for name in ("dedup.evaluations", "selection.pools")]
    assert compare().reasons == changed
