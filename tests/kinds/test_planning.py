"""Plans of every kind ask for what changed, say why, and for nothing else; and bad rows end a run that is to be strict."""

import json
import os
from pathlib import Path

import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.plan import pending_reasons

from tests.kinds.preparations import CHANGES_NO_BYTE, LONG_AGO
from tests.preparing import tree

pytestmark = pytest.mark.slow


def pending(planned):
    return [(Path(shard.part.file.uri).name, shard.part.start) for shard in planned.plan.pending]


def owned(data, shard_size):
    """The lines that begin in each slice, by its start."""
    found, place = {}, 0
    for line in data.splitlines(keepends=True):
        found.setdefault(place // shard_size * shard_size, []).append(line)
        place += len(line)
    return found


def elsewhere(prepared, value):
    return json.loads(json.dumps(value).replace(f"{prepared.folder}/", f"{prepared.folder}-moved/"))


def test_a_plan_asks_for_everything_at_first_and_then_for_nothing(prepared):
    first = prepared.plan()
    assert pending_reasons(first) == {"new": len(first.plan.shards)}
    prepared.run()
    for name, value in [*CHANGES_NO_BYTE.items(), ("on_bad_row", "fail")]:
        assert pending(prepared.plan(**{name: value})) == [], name
    for path in prepared.folder.rglob("*.jsonl"):
        os.utime(path)
    assert pending(prepared.plan()) == []
    assert [shard.key for shard in prepared.plan(force=True).plan.pending] == [
        shard.key for shard in first.plan.pending
    ]


def test_settings_that_change_no_byte(prepared):
    prepared.run()
    prepared.run(force=True, **{**CHANGES_NO_BYTE, "cluster": "auto"})
    shards = {name for name in prepared.whole if name.startswith("shards/")}
    found = tree(prepared.out)
    assert {name for name in shards if found[name] != prepared.whole[name]} == set()


def test_moved_sources_build_nothing(prepared):
    prepared.run()
    moved = prepared.folder.with_name(f"{prepared.folder.name}-moved")
    blend, settings = prepared.blend, prepared.settings
    prepared.folder.rename(moved)
    try:
        prepared.blend, prepared.settings = elsewhere(prepared, blend), elsewhere(prepared, settings)
        prepared.out = moved / "out"
        assert pending(prepared.plan()) == []
    finally:
        moved.rename(prepared.folder)
        prepared.blend, prepared.settings, prepared.out = blend, settings, prepared.folder / "out"


@pytest.mark.parametrize("change", ["a row", "a row more", "rows more"])
def test_a_changed_file_costs_the_slices_that_changed(prepared, change):
    prepared.run(shard_size=prepared.slices)
    sources = [Path(shard.part.file.uri) for shard in prepared.plan().plan.shards]
    path = max((path for path in sources if path.suffix == ".jsonl"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    *_, row = (line for line in content.splitlines(keepends=True) if b'": ' in line)
    middle = content.index(b'": ', len(content) // 2)
    more = {"a row": 0, "a row more": 1, "rows more": 3}[change]
    rows = [row.replace(b'": ', b'": ' + b" " * number, 1) for number in range(1, more + 1)]
    changed = content + b"".join(rows) if more else content[:middle] + b'":\t' + content[middle + 3 :]
    before, after = owned(content, prepared.slices), owned(changed, prepared.slices)
    path.write_bytes(changed)
    planned = prepared.plan(shard_size=prepared.slices)
    path.write_bytes(content)
    os.utime(path, LONG_AGO)
    assert len(before) > 1
    assert pending(planned) == [(path.name, start) for start in after if after[start] != before.get(start)]
    assert pending_reasons(planned).keys() <= {"source content changed", "new"}


@pytest.mark.parametrize("built", [False, True])
def test_a_strict_run_ends_at_a_bad_row(prepared, built):
    """Whether its shards are there from a run that set bad rows aside, or not yet."""
    reasons = "|".join(prepared.dropped)
    words = rf"{prepared.folder}/\S+\.jsonl:\d+: ({reasons}): .*on_bad_row=quarantine"
    if built:
        prepared.run()
        words = rf"rows are bad \(({reasons}) .*0 are allowed"
    before = tree(prepared.out)
    with pytest.raises(RunError, match=words):
        prepared.run(on_bad_row="fail")
    assert {name for name in before if tree(prepared.out)[name] != before[name]} <= {"manifest.json"}
    assert built or not (prepared.out / "blend.json").exists()
