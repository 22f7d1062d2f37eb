"""Damage to any file that is vouched for, in the output of every kind: verification names it, and the next run mends it
and builds nothing else.

A file of each kind in each folder has one byte flipped; the other damages take turns.
"""

import itertools
import json
import re

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.verify import verify

from tests.building import build_here
from tests.preparing import tree
from tests.shards.damage import DAMAGES, flip, names_of, proofs

pytestmark = pytest.mark.slow

FLIPPED, *OTHERS = DAMAGES


def entries_of(out):
    """The keys of the shards that the manifest names, derived ones included."""
    manifest = json.loads((out / "manifest.json").read_bytes())
    entries = [*manifest["shards"], *manifest.get("derived", {}).get("shards", [])]
    return {entry["key"] for entry in entries}


def vouched_for(out):
    """A file of each ending in each folder that a verification reads, and each at the top; shards of a kind share a folder."""
    keys, found = entries_of(out), {}
    for path in proofs(out):
        folder = path.relative_to(out).parts[:-1]
        if folder[:1] != ("shards",) or keys & {*folder}:
            stage = folder[: 2 if folder[:1] == ("shards",) else 1]
            apart = not folder or path.suffix == ".json"
            kind = path.name if apart else (path.suffix, "_leading_" in path.name)
            found.setdefault((stage, kind), path)
    return found.values()


def check(out):
    return verify(str(out), inspector_of(str(out)))


def checked(out):
    """What a verification finds, and the receipts that it withdrew; damage to the manifest itself ends it with an error."""
    try:
        found = check(out)
    except InputError as error:
        return [str(error).replace(f"{out}: no manifest.json", f"{out}/manifest.json: missing")], set()
    return found.problems, {*found.withdrawn}


def test_damage_is_named_and_only_that_is_rebuilt(prepared):
    prepared.run()
    out, built = prepared.out, set()
    assert check(out).problems == []
    keys, others = entries_of(out), itertools.cycle(OTHERS)

    def noting(step, pending, store, arguments, *, rebuild):
        def note(record):
            built.update(() if record["reused"] else [record["key"]])

        return build_here(step, pending, store, arguments, rebuild=rebuild, announce=note)

    for path, damage in itertools.product(vouched_for(out), (FLIPPED, None)):
        name = damage or next(others)
        links = names_of(path, out)
        DAMAGES[name](path)
        damaged = links if path.exists() and path.stat().st_nlink > 1 else {str(path)}
        problems, withdrawn = checked(out)
        assert any(problem.startswith(tuple(damaged)) for problem in problems), (path, name)
        concerned = {key for place in damaged for key in re.findall(r"/([0-9a-f]{32})/", place)}
        of_prefix = "/prefix/" in "".join(damaged)  # one is mended from its members
        assert of_prefix or path.name == "receipt.json" or withdrawn == concerned & keys, (path, name)
        built.clear()
        planned, _ = prepared.run(build=noting)
        assert of_prefix or built & {*planned.plan.keys} == concerned & {*planned.plan.keys}, (path, name)
        assert tree(out) == prepared.whole, (path, name)
    assert check(out).problems == []


def test_damaged_caches_only_cost_time(prepared):
    prepared.run()
    for path in (prepared.out / "shards").glob("*.json"):
        for damage in DAMAGES.values():
            damage(path)
            assert not prepared.plan().plan.pending
            prepared.run()
            assert tree(prepared.out) == prepared.whole


def test_a_published_copy_is_compared_by_content(prepared):
    prepared.run()
    linked = [path for path in proofs(prepared.out) if path.stat().st_nlink > 1]
    path = next(path for path in linked if not path.is_relative_to(prepared.out / "shards"))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert check(prepared.out).problems == []
    flip(path, len(content) // 2)
    assert any(problem.startswith(str(path)) for problem in check(prepared.out).problems)
    prepared.run()
    assert check(prepared.out).problems == []
    assert tree(prepared.out) == prepared.whole
