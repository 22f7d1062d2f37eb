"""Nights whose blends, data and output lie in a bucket, of a store that fails every fifth request."""

import json
import shutil
from uuid import uuid4

import fsspec
import pytest
from tokenmill.tasks.nightly.night import claimed, follow_prepared
from tokenmill.tasks.report.summary import artifact_record
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.tokenize.kind import PRETRAIN

from tests.flaky_storage import flaky_server, used_here
from tests.nightly.nights import BOOKS, FIRST, NEWS, SECOND, THIRD, WEB, Nights, at, texts, write
from tests.preparing import prepare

pytestmark = pytest.mark.slow

ALL = NEWS, WEB, BOOKS
FOURTH, FIFTH = "2026-11-24", "2026-11-25"


@pytest.fixture(scope="module")
def server():
    with flaky_server(rate=0.2) as server, used_here(server):
        yield server


class StoredNights(Nights):
    """The same, in a bucket: what is written into `folder` gets there by `upload`."""

    shard_size = 2_000

    def __init__(self, folder, server):
        super().__init__(folder)
        bucket = server.bucket(f"bucket-{uuid4()}")
        self.server, self.place = server, f"{bucket}/kept"
        self.upload()
        self.blends, self.out = f"{self.place}/blends", f"{self.place}/out"

    def upload(self, name=""):
        """Put what lies in the folder `name` into the bucket; blends name the data that is there."""
        there = self.folder.with_name("uploaded")
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(self.folder / name, there)
        for blend in there.rglob("*.json"):
            if blend.parent.name == "pretrain":
                blend.write_text(blend.read_text().replace(str(self.folder), self.place))
        self.server.upload(there, f"{self.place}/{name}".rstrip("/"))

    def latest(self, name):
        with fsspec.open(f"{self.out}/{name}/latest.json") as file:
            return json.load(file)["pretrain"]

    def versions(self, name):
        system, path = fsspec.url_to_fs(f"{self.out}/{name}")
        system.invalidate_cache()
        return sorted({found[len(path) :].split("/")[1] for found in system.find(path)} - {"latest.json"})

    def keys(self):
        """The keys of all shards that have a receipt, other than prefixes."""
        system, path = fsspec.url_to_fs(f"{self.out}/shards")
        system.invalidate_cache()
        return {name.split("/")[-2] for name in system.glob(f"{path}/pretrain/*/receipt.json")}


def proven(nights, name, version):
    verification = verify(f"{nights.out}/{name}/{version}", PRETRAIN.inspect)
    return verification.shards > 1 and verification.problems == []


@pytest.mark.timeout(600)
def test_nights_in_a_bucket(server, tmp_path):
    nights = StoredNights(tmp_path / "nights", server)
    nights.run(FIRST)
    unchanged_night_asks_for_no_data_and_no_receipts(nights)
    nights_that_overlap_each_make_a_whole_version_and_readers_are_led_to_the_later(nights)
    pruned_versions_take_their_own_shards_and_nothing_else(nights)


def unchanged_night_asks_for_no_data_and_no_receipts(nights):
    nights.server.faults.asked.clear()
    assert [compared.reasons for compared in nights.compare(SECOND).values()] == [[], [], []]
    bucket = nights.place.removeprefix("s3:/")
    read = {
        asked.split()[1].removeprefix(f"{bucket}/") for asked in nights.server.faults.asked if asked.startswith("GET")
    }
    assert not {name for name in read if name.endswith((".jsonl", "receipt.json", ".bin", ".idx"))}
    assert "blends/pretrain/news.json" in read


def nights_that_overlap_each_make_a_whole_version_and_readers_are_led_to_the_later(nights):
    write(nights.data / "recent/third.jsonl", texts("latest", 70))
    nights.upload("data/recent")
    compared = nights.compare(THIRD)[NEWS]
    assert compared.reasons == ["recent: 1 file new (third.jsonl)"]
    early, late = (claimed(compared, at(THIRD)) for _ in range(2))
    assert [early.version, late.version] == [THIRD, f"{THIRD}.2"]
    for compared in (late, early):
        _, manifest = prepare(compared.blend.path, compared.path, **compared.chosen)
        follow_prepared(compared, artifact_record(manifest, compared.path))
    assert nights.latest(NEWS)["version"] == late.version
    assert all(proven(nights, NEWS, version) for version in (early.version, late.version))
    assert {name for name, compared in nights.compare(FOURTH).items() if compared.reasons} == {WEB}


def pruned_versions_take_their_own_shards_and_nothing_else(nights):
    write(nights.data / "recent/first.jsonl", texts("other", 60))
    nights.upload("data/recent")
    before = nights.keys()
    made = nights.run(FOURTH, keep=1, grace_seconds=-60)
    assert [manifest["volatile"]["shards"]["built"] > 0 for manifest in made.values()] == [True, False]
    assert {name: nights.versions(name) for name in ALL} == {NEWS: [FOURTH], WEB: [FOURTH], BOOKS: [FIRST]}
    assert before - nights.keys()
    assert all(proven(nights, name, nights.latest(name)["version"]) for name in ALL)
    assert not any(compared.reasons for compared in nights.compare(FIFTH).values())
    assert nights.server.faults.counts["slow"] > 10
