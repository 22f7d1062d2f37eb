"""What older versions left, this one reads: their archives stand beside this file, and `write.py` explains how to add one.

A row of the table is a kind of an archive. It has the words with which commands say what they can't do with it: everything else
is done.
"""

import json
import tarfile
import time
from pathlib import Path

import pytest
from tokenmill.flows.cli import run
from tokenmill.tasks.nightly.blends import find_blends
from tokenmill.tasks.nightly.night import compare_blend, follow_prepared, prune_night
from tokenmill.tasks.report.push import parcel_of
from tokenmill.tasks.report.summary import artifact_record

from tests.building import build_here, prepare_here
from tests.shards.damage import DAMAGES
from tests.upgrades.write import DATA, HERE, NIGHTLY

pytestmark = pytest.mark.slow

MAPLESS = dict.fromkeys(("why", "diff"), "built before the fates of rows were recorded")
UNSEEN = {"view": "view shows pretrain and sft"}
UNFOLLOWED = dict.fromkeys(("why", "diff"), "which publishes no documents")
OF_KIND = {"rl": UNSEEN, "harmony": UNSEEN, "dedup": UNSEEN, "nll": UNSEEN | UNFOLLOWED}
"""What commands do with no version of a kind."""

VERSIONS = {
    "4e4bf88": {
        "pretrain": MAPLESS | {"verify": "format 1 of pretrain (1 of 1 shards), made by tokenmill 0.1.0"},
        "sft": {"verify": "format 2 of sft", "diff": "format 2 of sft doesn't have this file"},
        "rl": MAPLESS | {"verify": "format 2 of rl"},
        "harmony": {"verify": "format 1 of harmony-selection"},
        "dedup": MAPLESS | {"verify": "format 1 of dedup"},
        "nll": {},
    },
    **{version: {kind: {} for kind in DATA} for version in ("77edf30", "4f9c51b")},
}


def output_of(kind):
    """The folder of the version's output of a kind, and the store."""
    if kind not in NIGHTLY:
        return f"{HERE}/{kind}", f"{HERE}/{kind}/shards"
    (found,) = Path(HERE, "out", kind).glob("tiny/2*")
    return str(found), f"{HERE}/out/shards"


def proofs():
    return {path: path.read_bytes() for path in Path().rglob("receipt.json")}


def prepare(kind, store):
    """Prepare the same rows into `new`, with the older version's store."""
    blends = {"dedup": f"{HERE}/blends/pretrain/tiny.json", "nll": f"{HERE}/data/scored.jsonl"}
    chosen = {"dedup": {"mode": "tag"}, "nll": {"model": f"{HERE}/model"}}.get(kind, {})
    prepare_here(kind, blends.get(kind, f"{HERE}/blends/{kind}/tiny.json"), f"{HERE}/new", store=store, **chosen)


def night(kind, before):
    """A nightly run of the blend of a kind, which compares it with the older version and keeps that."""
    (blend,) = (each for each in find_blends(f"{HERE}/blends") if each.kind == kind)
    compared = compare_blend(blend, f"{HERE}/out", {}, time.time())
    assert compared.previous == before
    if compared.reasons:
        _, manifest = prepare_here(kind, blend.path, compared.path, build_here, **compared.chosen)
        follow_prepared(compared, artifact_record(manifest, compared.path))
    assert prune_night(f"{HERE}/out", 7, 3600.0)[0] == []
    assert compare_blend(blend, f"{HERE}/out", {}, time.time()).reasons == []


@pytest.mark.parametrize(("version", "kind"), [(version, kind) for version in VERSIONS for kind in VERSIONS[version]])
def test_outputs_of_older_versions(version, kind, tmp_path, monkeypatch, capfd):
    with tarfile.open(Path(__file__).parent / f"{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    (place, store), before = output_of(kind), proofs()
    excused = OF_KIND.get(kind, {}) | VERSIONS[version][kind]
    row = f"{HERE}/data/{DATA[kind]}.jsonl:1"

    def told(*command):
        """Run a command that does its work, or says what it can't do."""
        code, words = run([*command]), capfd.readouterr().err.replace("\n", " ")
        expected = excused.get(command[0])
        assert (expected in words) if expected else code == 0, (command, words)
        return code, words

    def verified():
        """What a verification says, which finds no problem, and judges the formats that it knows."""
        code, words = told("verify", place)
        assert (code, "not checked: format" in words) == (0, "verify" in excused), words
        return words

    verified()
    told("view", place)
    told("why", place, "--row", row)
    parcel_of(place)
    told("report", place)
    assert "report.html" not in verified(), "its page is of this version"
    prepare(kind, store)
    told("diff", place, f"{HERE}/new")
    if kind in NIGHTLY:
        night(kind, place)
    assert proofs().items() >= before.items()
    key = json.loads(Path(place, "manifest.json").read_bytes())["shards"][0]["key"]
    DAMAGES["a byte flipped"](next(each for each in sorted(Path(store, kind, key).iterdir()) if each.suffix != ".json"))
    assert run(["verify", place]) == 1
    assert {path.parent.name for path in before.keys() - proofs().keys()} == {key}, "a hash differs"
