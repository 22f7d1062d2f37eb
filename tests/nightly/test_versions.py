"""Versions only go up, readers are led to whole ones, and old ones go by the policy."""

import json
import shutil
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.nightly.blends import NightlyBlend
from tokenmill.tasks.nightly.night import Comparison, follow_prepared
from tokenmill.tasks.nightly.versions import claim, follow, latest, lineage, next_version, order, prune_versions
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.settings import PreparationSettings

from tests.nightly.nights import at

days = st.dates().map(lambda day: day.isoformat()).filter(lambda day: day >= "1971")
versions = st.tuples(days, st.integers(1, 30)).map(lambda pair: pair[0] + (f".{pair[1]}" if pair[1] > 1 else ""))


@pytest.mark.parametrize(
    ("existing", "today", "expected"),
    [
        ([], "2026-11-22", "2026-11-22"),
        (["2026-11-21"], "2026-11-22", "2026-11-22"),
        (["2026-11-22"], "2026-11-22", "2026-11-22.2"),
        (["2026-11-22.9", "2026-11-22.10", "2026-11-22"], "2026-11-22", "2026-11-22.11"),
        (["2026-11-23", "2026-11-21"], "2026-11-22", "2026-11-23.2"),
    ],
    ids=["first", "next day", "same day", "more than nine a day", "the clock went back"],
)
def test_the_next_version_is_the_day_or_continues_the_last_one(existing, today, expected):
    assert next_version(existing, at(today)) == expected


@given(st.lists(versions, max_size=8), st.floats(0, 4e9))
def test_next_version_follows_all_others_at_any_time(existing, now):
    following = next_version(existing, now)
    assert all(order(version) < order(following) for version in existing)


def published(folder, *names):
    for name in names:
        (folder / name / "train").mkdir(parents=True)
        (folder / name / "train/data.bin").write_bytes(b"data")
        (folder / name / "blend.json").write_text("{}")
    return str(folder)


def lead(folder, version):
    follow(folder, {"pretrain": {"path": f"{folder}/{version}"}}, version=version, named_files={})


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


DAYS = ("2026-11-20", "2026-11-21", "2026-11-21.2", "2026-11-21.10")


PRUNED = {
    # the version that readers are led to, how many to keep, which other one is to stay, those that go, and those that stay
    "the newest stay": (3, 2, None, [0, 1], [2, 3]),
    "what readers are led to stays however old": (1, 1, None, [0, 2], [1, 3]),
    "without a latest version nothing goes": (None, 1, None, [], [0, 1, 2, 3]),
    "those that failed after publishing push out no good ones": (0, 1, None, [1, 2], [0, 3]),
    "those that are to stay count for nothing": (3, 1, 0, [1, 2], [0, 3]),
}


@pytest.mark.parametrize("case", PRUNED)
def test_versions_go_by_the_policy_and_nothing_else_of_the_folder_is_touched(tmp_path, case):
    led, keep, stays, gone, left = PRUNED[case]
    others = ["2026", "2026-11-19.backup", "notes"]
    folder = published(tmp_path, *DAYS, *others)
    if led is not None:
        lead(folder, DAYS[led])
        assert latest(folder).version == DAYS[led]
    also = [] if stays is None else [f"{folder}/{DAYS[stays]}"]
    assert prune_versions(folder, keep, also) == [DAYS[each] for each in gone]
    assert lineage(folder) == [DAYS[each] for each in left]
    assert {*names_in(folder)} - {"latest.json"} == {*others, *(DAYS[each] for each in left)}
    assert prune_versions(folder, keep, also) == []


def test_incomplete_versions_are_ignored_and_removed_later(tmp_path):
    folder = published(tmp_path, *DAYS)
    (tmp_path / DAYS[0] / "blend.json").unlink()
    (tmp_path / DAYS[3] / "blend.json").unlink()
    lead(folder, DAYS[2])
    assert lineage(folder) == [DAYS[1], DAYS[2]]
    assert prune_versions(folder, 7) == [DAYS[0]]
    assert lineage(folder) == [DAYS[1], DAYS[2]]
    assert (tmp_path / DAYS[3]).exists(), "it may be on its way"


def test_interrupted_removal_deletes_whole_versions(tmp_path, monkeypatch):
    folder = published(tmp_path, *DAYS)
    lead(folder, DAYS[-1])

    def cut_short(place, *_, **__):
        Path(place, "train/data.bin").unlink()
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(OSError, match="power cut"):
            prune_versions(folder, 2)
    assert DAYS[0] not in lineage(folder)
    assert prune_versions(folder, 2) == [*DAYS[:2]]


def test_links_to_versions_are_counted_and_never_removed(tmp_path):
    folder = published(tmp_path / "out", *DAYS[1:])
    (tmp_path / "out" / DAYS[0]).symlink_to(published(tmp_path / "elsewhere", "precious") + "/precious")
    lead(folder, DAYS[-1])
    assert lineage(folder) == [*DAYS]
    assert prune_versions(folder, 1) == [*DAYS[1:3]]
    assert lineage(folder) == [DAYS[0], DAYS[-1]]
    assert names_in(tmp_path / "elsewhere/precious") == ["blend.json", "train"]


@pytest.fixture
def stored():
    """A folder in a store that has no locks."""
    return f"memory://{uuid.uuid4()}"


def test_concurrent_nights_make_separate_versions(stored):
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda _: claim(stored, DAYS[1], at(DAYS[1])), range(4)))
    assert sorted(taken, key=order) == [DAYS[1], *(f"{DAYS[1]}.{number}" for number in (2, 3, 4))]
    assert claim(stored, DAYS[0], at(DAYS[0])) == DAYS[0]


def test_on_a_disk_the_lock_is_enough(tmp_path):
    assert [claim(str(tmp_path), DAYS[0], at(DAYS[0])) for _ in range(2)] == [DAYS[0], DAYS[0]]
    assert names_in(tmp_path) == []


def test_version_in_progress_is_kept_until_old(stored):
    claim(stored, DAYS[0], at(DAYS[0]))
    publish_bytes(f"{stored}/{DAYS[2]}/blend.json", b"{}")
    lead(stored, DAYS[2])
    assert prune_versions(stored, 7, young_from=time.time() - 60) == []
    assert prune_versions(stored, 7, young_from=time.time() + 60) == [DAYS[0]]
    assert lineage(stored) == [DAYS[2]]


def test_a_night_that_ends_after_a_later_one_leaves_readers_where_they_are(tmp_path):
    lead(str(tmp_path), DAYS[2])
    for version, expected in ((DAYS[1], DAYS[2]), (DAYS[3], DAYS[3])):
        compared = Comparison(
            NightlyBlend("blends", "pretrain/web"), PreparationSettings(), str(tmp_path), None, None, version, [], {}
        )
        follow_prepared(compared, {"pretrain": {"path": compared.path}})
        assert latest(str(tmp_path)).version == expected


def test_damaged_latest_file_never_names_a_wrong_version(tmp_path):
    follow(str(tmp_path), {"pretrain": {"path": "/out", "tokens": 5}}, version=DAYS[1], named_files={"a": "b"})
    place = tmp_path / "latest.json"
    whole, expected = place.read_bytes(), latest(str(tmp_path))
    assert json.loads(whole)["pretrain"]["tokens"] == 5
    for number in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[number // 8] ^= 1 << number % 8
        place.write_bytes(damaged)
        with pytest.raises(InputError, match="remove it"):
            latest(str(tmp_path))
    place.write_bytes(whole)
    assert latest(str(tmp_path)) == expected
