"""Preparations from a bucket to a bucket that refuses, breaks off and forgets to answer: the bytes of an undisturbed run
into a local folder, nothing ever seen half-written, and receipts that prove.

Every fourth request fails, in the four ways of `flaky_storage`, and what is longer than 4 kB is uploaded in parts. The
sources are those of `preparations`.
"""

import json
import re
from pathlib import Path

import pytest
from tokenmill.flows.direct import run_preparation
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.seal import unsealed
from tokenmill.tasks.shards import store
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.strict import parse
from xxhash import xxh3_128_hexdigest

from tests.flaky_storage import KINDS, flaky_server, small_parts, used_here
from tests.kinds.preparations import PREPARATIONS, sample
from tests.preparing import tree

pytestmark = pytest.mark.slow

STAYS = ("out", "folder", "model")


@pytest.fixture(scope="module")
def server():
    with flaky_server() as server, used_here(server), small_parts(4_000):
        yield server


@pytest.fixture
def stored(request, server, tmp_path):
    """A preparation of a kind from a bucket to a bucket."""
    with sample(request.param, tmp_path) as preparation:
        yield Stored(preparation, tmp_path, server)


class Stored:
    """A preparation whose sources lie in a bucket, into a folder of that bucket or another place."""

    def __init__(self, preparation, folder, server):
        self.server, self.bucket, self.place = server, f"bucket-{folder.name}".replace("_", "-"), None
        self.place = server.bucket(self.bucket)
        self.preparation = preparation
        server.upload(folder, f"{self.place}/in")
        for name, value in vars(self.preparation).items():
            if name not in STAYS and isinstance(value, str | dict):
                setattr(self.preparation, name, moved(value, str(folder), f"{self.place}/in"))

    def run(self, out):
        self.preparation.out = out
        return self.preparation.run()

    def versions(self, name):
        """Every content that any file of the folder `name` ever had."""
        found = self.server.versions(self.bucket)
        return {key.removeprefix(f"{name}/"): each for key, each in found.items() if key.startswith(f"{name}/")}

    def tree(self, name, folder):
        """`tree` of the folder `name` of the bucket, as if it lay in `folder`, an empty local one."""
        there = self.server.keys(self.bucket)
        for path, (content, *_) in self.versions(name).items():
            if f"{name}/{path}" not in there:
                continue
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            is_text = path.startswith("blend.") or path == "manifest.json"
            place.write_bytes(
                content.replace(f"{self.place}/{name}".encode(), str(folder).encode()) if is_text else content
            )
        return tree(folder)


def moved(value, old, new):
    """Settings in which another place is named, except for that of a model."""
    if isinstance(value, dict):
        return {name: each if name in STAYS else moved(each, old, new) for name, each in value.items()}
    return json.loads(json.dumps(value).replace(old, new))


def resolved(found):
    """A tree in which the names of shards are what they name: where nothing can be linked, some are the shards' own."""
    manifest = json.loads(found["manifest.json"])
    entries = [*manifest["shards"], *manifest.get("derived", {}).get("shards", [])]
    names = sorted(name for entry in entries for listed in entry["published"].values() for name in listed)
    contents = {name: b"".join(found[path] for path in sorted(found) if path.startswith(name)) for name in names}
    texts = {path: found[path] for path in found if path.startswith("blend.") or path == "manifest.json"}
    for name, content in contents.items():
        assert content
        texts = {
            path: text.replace(name.encode(), xxh3_128_hexdigest(content).encode()) for path, text in texts.items()
        }
    others = {path: found[path] for path in found if path.startswith("shards/") or not path.startswith(tuple(names))}
    return others | texts


def assert_never_half(versions):
    """What a reader could ever have seen was whole: what vouches for other files fits its own seal, and every other file
    always had the bytes that it has now.
    """
    for path, contents in versions.items():
        for content in contents:
            if path.endswith("receipt.json"):
                Receipt.load(content)
            elif path == "manifest.json":
                unsealed(content)
            else:
                assert content == contents[0], path


def assert_none_pending(stored, folder):
    """No upload is left but those that were begun without an answer, and those that the store refused to take back."""
    log = stored.server.faults.log
    begun = [asked for kind, asked in log if kind == "unsaid" and "uploads=" in asked]
    kept = {asked for _, asked in log if asked.startswith("DELETE ")}
    pending = [each for each in stored.server.pending(stored.bucket) if each["Key"].startswith(f"{folder}/")]
    assert len(pending) <= len(begun) + len(kept)


def assert_proven(out):
    verification = verify(out, inspector_of(out))
    assert verification.shards > 1
    assert verification.problems == []


@pytest.mark.parametrize("stored", PREPARATIONS, indirect=True)
def test_every_preparation_from_a_bucket_to_a_bucket_has_the_bytes_of_a_local_run(stored, server, tmp_path):
    out = f"{stored.place}/out"
    server.faults.clear()
    stored.run(tmp_path / "local")
    server.faults.clear(rate=0.25, seed=1)
    stored.run(out)
    assert sum(server.faults.counts[each] for each in KINDS) > 5, "the test must meet faults"
    assert_none_pending(stored, "out")
    server.faults.clear()
    assert resolved(stored.tree("out", tmp_path / "fetched")) == resolved(tree(tmp_path / "local"))
    assert_never_half(stored.versions("out"))
    assert_proven(out)
    assert not stored.preparation.plan().plan.pending


@pytest.mark.parametrize("stored", ["pretrain"], indirect=True)
def test_a_run_reads_each_receipt_once(stored, server, monkeypatch):
    monkeypatch.setattr(store, "LISTED", 1)  # as for 1,000 shards
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    kind = preparation("pretrain")
    settings = parse(kind.settings, stored.preparation.settings, "settings")
    for built in (True, False):
        server.faults.clear()
        record = run_preparation(kind, kind.read_blend(stored.preparation.blend), f"{stored.place}/out", settings)
        assert (record["pretrain"]["shards"]["built"] > 1) == built
        asked = server.faults.asked
        reads = [asked[each] for each in asked if re.match(r"GET \S+/shards/pretrain/\w+/receipt.json", each)]
        assert len(reads) == record["pretrain"]["shards"]["total"]
        assert set(reads) == {1}


@pytest.mark.parametrize("stored", ["pretrain"], indirect=True)
def test_store_outage_fails_the_run_and_the_next_repairs(stored, server, tmp_path):
    server.faults.clear()
    stored.run(tmp_path / "local")
    expected = resolved(tree(tmp_path / "local"))
    stored.run(f"{stored.place}/whole")
    requests = server.faults.counts["requests"]
    for number, failing in enumerate(["slow", "cut", "unsaid"], 1):
        out = f"{stored.place}/{number}"
        server.faults.clear(down_from=number * requests // 8, kinds=(failing,))
        with pytest.raises(OSError, match=rf"s3://{stored.bucket}/"):
            stored.run(out)
        assert_none_pending(stored, number)
        server.faults.clear()
        assert_never_half(stored.versions(str(number)))
        stored.run(out)
        assert_proven(out)
        assert resolved(stored.tree(str(number), tmp_path / f"fetched-{number}")) == expected
