# ruff: noqa: PT012 - what is raised inside a publication is the subject here
import errno
import fcntl
import gc
import itertools
import resource
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from s3fs import S3FileSystem
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards import publish as publish_module
from tokenmill.tasks.shards.publish import Output, copy, link, place_files, publish, publish_bytes, sweep

from tests.faults.injection import PowerOff, count_operations, fail_operation, intercept, killed_at
from tests.forking import in_processes

OLD, NEW = b"old " * 1000, b"the new content " * 1000


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(OLD)
    return path


def write_in_parts(path):
    """Several writes to the disk, so that a fault can fall between them."""
    with mock.patch.object(publish_module, "PART", 5000), publish(str(path)) as publication:
        for start in range(0, len(NEW), 700):
            publication.write(NEW[start : start + 700])
    return publication.output


def temporaries(directory):
    return sorted(path.name for path in Path(directory).iterdir() if path.name.startswith("."))


def operations_of(work):
    with count_operations() as log:
        work()
    return log.names()


buffers = st.one_of(
    st.binary(max_size=70),
    st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda ids: np.array(ids, np.int32)),
    st.lists(st.integers(0, 2**16 - 1), max_size=10).map(lambda ids: np.array([ids, ids], np.uint16)),
    st.binary(max_size=70).map(memoryview),
)


@given(written=st.lists(buffers, max_size=12), part=st.integers(1, 100))
def test_the_file_is_the_buffers_in_order_with_their_size_and_hash(written, part):
    expected = b"".join(bytes(buffer) for buffer in written)
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(publish_module, "PART", part):
        path = Path(directory, "deep", "er", "data.bin")
        with publish(str(path)) as publication:
            counts = [publication.write(buffer) for buffer in written]
        assert path.read_bytes() == expected
        assert counts == [memoryview(buffer).nbytes for buffer in written]
        assert publication.output == Output(str(path), len(expected), xxhash.xxh3_128(expected).hexdigest())
        assert temporaries(path.parent) == []


def test_file_url_is_a_local_path(tmp_path):
    output = publish_bytes(f"file://{tmp_path}/a.json", b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"
    assert output.path == f"file://{tmp_path}/a.json"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), FileNotFoundError(2, "gone", "in.jsonl")])
def test_an_exception_in_the_block_passes_unchanged_and_leaves_the_old_file(target, error):
    with pytest.raises(type(error)) as raised, publish(str(target)) as publication:
        publication.write(NEW)
        raise error
    assert raised.value is error
    assert getattr(error, "filename", "in.jsonl") == "in.jsonl"
    assert target.read_bytes() == OLD
    assert temporaries(target.parent) == []
    with pytest.raises(ValueError, match="after the publication has ended"):
        publication.write(NEW)


def test_non_contiguous_buffer_is_rejected(target):
    with pytest.raises(TypeError, match="contiguous"), publish(str(target)) as publication:
        publication.write(np.arange(10)[::2])
    assert target.read_bytes() == OLD


def test_kernel_errors_name_the_target(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotADirectoryError) as raised:
        publish_bytes(str(tmp_path / "file" / "data.bin"), NEW)
    assert raised.value.filename == str(tmp_path / "file" / "data.bin")
    with pytest.raises(IsADirectoryError, match=r"/folder'$"):
        publish_bytes(str(tmp_path / "folder"), NEW)
    assert temporaries(tmp_path) == []


def test_plain_errors_get_the_target_as_a_note(target):
    with (
        fail_operation(2, OSError("the store is closed")),
        pytest.raises(OSError, match="the store is closed") as raised,
    ):
        publish_bytes(str(target), NEW)
    assert str(target) in "".join(raised.value.__notes__)


def test_running_out_of_room_leaves_the_old_file(target):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The last write comes back short: only the next try raises.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) - 100, hard))
    try:
        with pytest.raises(OSError, match=r"data\.bin'$") as raised:
            write_in_parts(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert target.read_bytes() == OLD
    assert temporaries(target.parent) == []


def check_recovery(work, target):
    """After a fault the target is whole, and sweeping and trying again leaves it new and alone."""
    assert target.read_bytes() in (OLD, NEW)
    sweep(str(target.parent))
    assert temporaries(target.parent) == []
    work()
    assert target.read_bytes() == NEW
    assert temporaries(target.parent) == []
    target.write_bytes(OLD)


def test_a_publication_syncs_the_file_then_names_it_then_syncs_the_directory(tmp_path):
    names = operations_of(lambda: write_in_parts(tmp_path / "new" / "data.bin"))
    assert names[:3] == ["mkdir", "open", "fsync"]
    assert names[3] == "open"
    assert set(names[4:-4]) == {"write"}
    assert names[-4:] == ["fsync", "replace", "open", "fsync"]


@pytest.mark.parametrize("work", ["a write", "a copy"])
@pytest.mark.parametrize("make", [lambda: OSError(errno.ENOSPC, "full"), PowerOff], ids=["no room", "no power"])
def test_any_operation_may_fail(source, target, work, make):
    def publication():
        copy(str(source), str(target)) if work == "a copy" else write_in_parts(target)

    total = len(operations_of(publication))
    target.write_bytes(OLD)
    for number in range(1, total + 1):
        error = make()
        with fail_operation(number, error), pytest.raises(type(error)) as raised:
            publication()
        if work == "a write" and isinstance(error, OSError):
            assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(target))
            assert temporaries(target.parent) == []
        check_recovery(publication, target)


def test_a_failed_clean_up_does_not_hide_what_went_wrong(target):
    def everything_fails(number, name, arguments):
        if number > 1:
            raise OSError(errno.EIO if name == "unlink" else errno.ENOSPC, name)

    with intercept(everything_fails), pytest.raises(OSError, match=r"data\.bin'$") as raised:
        write_in_parts(target)
    assert raised.value.errno == errno.ENOSPC
    check_recovery(lambda: write_in_parts(target), target)


def test_sweep_removes_only_orphans(target):
    kept = [".hidden", ".data.bin.tmp", "data.bin.0123456789abcdef.tmp", ".data.bin.0123456789ABCDEF.tmp"]
    for name in kept:
        (target.parent / name).write_bytes(b"mine")
    orphan = target.parent / ".data.bin.0123456789abcdef.tmp"
    orphan.write_bytes(b"half")
    with publish(str(target)) as publication:
        publication.write(NEW)
        assert sweep(str(target.parent)) == [str(orphan)]
    assert target.read_bytes() == NEW
    assert sorted(path.name for path in target.parent.iterdir()) == sorted([*kept, "data.bin"])
    assert sweep(str(target.parent / "missing")) == []


def test_a_sweep_between_creation_and_lock_costs_a_second_try(target):
    swept = []

    def sweep_first(descriptor, kind):
        if not swept:
            swept.append(None)
            swept.extend(sweep(str(target.parent)))
        real(descriptor, kind)

    real = fcntl.flock
    with mock.patch.object(fcntl, "flock", sweep_first):
        publish_bytes(str(target), NEW)
    assert len(swept) == 2
    assert target.read_bytes() == NEW
    assert temporaries(target.parent) == []


def test_a_folder_that_is_removed_while_it_is_empty_is_made_again(tmp_path):
    """As pruning does with the folder of an old shard that another run builds again."""
    path, removed = tmp_path / "shard" / "all.bin", []

    def remove(number, name, arguments):
        if name == "open" and not removed:
            removed.append(path.parent.rmdir())

    with intercept(remove):
        publish_bytes(str(path), NEW)
    assert removed
    assert path.read_bytes() == NEW


def test_without_locks_files_are_published_and_nothing_is_swept(target):
    orphan = target.parent / ".data.bin.0123456789abcdef.tmp"
    orphan.write_bytes(b"perhaps alive")
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOSYS, "no locks")):
        publish_bytes(str(target), NEW)
        assert sweep(str(target.parent)) == []
    assert target.read_bytes() == NEW
    assert orphan.exists()


def test_rival_writers_and_sweepers_leave_one_whole_content(target):
    contents = [OLD, *(bytes([number]) * (200_000 + number) for number in range(4))]

    def writer(number):
        def work():
            for _ in range(25):
                publish_bytes(str(target), contents[number])
                sweep(str(target.parent))

        return work

    seen = {target.read_bytes() for _ in in_processes(*(writer(number) for number in range(1, 5)))}
    assert seen <= set(contents)
    assert target.read_bytes() in contents[1:]
    assert temporaries(target.parent) == []


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "store" / "shard.bin"
    path.parent.mkdir()
    path.write_bytes(NEW)
    return path


def test_a_link_is_the_same_file_under_a_second_name(source, target):
    link(str(source), str(target))
    assert target.samefile(source)
    link(str(source), str(source.parent / "new" / "name.bin"))
    assert (source.parent / "new" / "name.bin").samefile(source)
    assert {"link", "replace"}.isdisjoint(operations_of(lambda: link(str(source), str(target))))
    assert temporaries(target.parent) == []


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.ENOTSUP])
def test_where_no_link_can_be_made_the_file_is_copied(source, target, code):
    number = operations_of(lambda: link(str(source), str(target))).index("link") + 1
    publish_bytes(str(target), OLD)
    with fail_operation(number, OSError(code, "no link")):
        link(str(source), str(target))
    assert target.read_bytes() == NEW
    assert not target.samefile(source)
    assert temporaries(target.parent) == []


@pytest.fixture
def pairs(tmp_path):
    """Files of a store, and the names that they are to have in two folders."""
    folder = tmp_path / "store"
    folder.mkdir()
    for number in range(6):
        (folder / str(number)).write_bytes(b"%d" % number)
    return [(str(folder / str(number)), str(tmp_path / "out" / "ab"[number % 2] / f"{number}")) for number in range(6)]


def placed(pairs):
    return all(Path(target).samefile(source) for source, target in pairs)


def unsynced(log):
    """The folders in which a name was given after they were last synced."""
    found = set()
    for operation, following in itertools.pairwise(log.operations):
        if operation.name == "replace":
            found.add(str(Path(operation.subject).parent))
        elif operation.name == "open" and following.name == "fsync":
            found.discard(str(operation.subject))
    return found


def test_many_names_take_one_sync_for_each_folder_after_its_last(pairs):
    with count_operations() as log:
        place_files(pairs)
    assert placed(pairs)
    assert unsynced(log) == set()
    folders = {str(Path(target).parent) for _, target in pairs}
    assert [each.subject for each in log.operations if each.name == "open" and each.subject in folders] == list(
        dict.fromkeys(str(Path(target).parent) for _, target in pairs)
    )


@pytest.mark.slow
def test_names_that_a_killed_run_gave_are_synced_by_the_next(pairs):
    total = len(operations_of(lambda: place_files(pairs)))
    for number in range(1, total + 1):
        shutil.rmtree(Path(pairs[0][1]).parents[1])
        assert killed_at(number, lambda: place_files(pairs))
        with count_operations() as log:
            place_files(pairs)
        assert placed(pairs)
        assert {str(each.subject) for each in log.operations if each.name == "open"} >= {
            str(Path(target).parent) for _, target in pairs
        }
        assert unsynced(log) == set()


def test_files_of_a_store_are_copied_and_local_ones_linked(bucket, pairs):
    stored_pairs = [(source, f"s3://shards/out/{Path(target).name}") for source, target in pairs]
    place_files([*stored_pairs, *pairs])
    assert placed(pairs)
    assert [stored(bucket, f"out/{Path(target).name}") for _, target in pairs] == [b"%d" % n for n in range(6)]


def test_impossible_name_is_reported(bucket, pairs):
    Path(pairs[3][0]).unlink()
    for missing in (pairs, [(source, f"s3://shards/{source[-1]}") for source, _ in pairs]):
        with pytest.raises(FileNotFoundError, match="store/3"):
            place_files(missing)


def test_rivals_and_sweeps_during_a_link_change_nothing(source, target):
    swept = []

    def rival(number, name, arguments):
        if name == "replace":
            swept.append(sweep(str(target.parent)))
            target.unlink()
            target.hardlink_to(source)

    with intercept(rival):
        link(str(source), str(target))
    assert swept == [[]]
    assert target.samefile(source)
    assert temporaries(target.parent) == []


def test_a_memory_file_appears_whole_or_not_at_all():
    uri = "memory://publish/data.bin"
    publish_bytes(uri, OLD)
    with pytest.raises(KeyboardInterrupt), publish(uri) as publication:
        publication.write(NEW)
        raise KeyboardInterrupt
    assert fsspec.filesystem("memory").cat_file(uri) == OLD
    assert publish_bytes(uri, NEW) == Output(uri, len(NEW), xxhash.xxh3_128(NEW).hexdigest())
    assert fsspec.filesystem("memory").cat_file(uri) == NEW


def stored(client, key="data.bin"):
    return client.get_object(Bucket="shards", Key=key)["Body"].read()


def pending(client):
    return client.list_multipart_uploads(Bucket="shards").get("Uploads", [])


LARGE = np.arange(6 << 20, dtype=np.uint16)


@pytest.mark.parametrize("content", [b"", NEW, LARGE.tobytes()], ids=["empty", "small", "large"])
def test_an_object_appears_when_the_block_ends(bucket, content):
    with publish("s3://shards/a/data.bin") as publication:
        publication.write(content)
        assert "Contents" not in bucket.list_objects_v2(Bucket="shards")
    assert stored(bucket, "a/data.bin") == content
    assert publication.output.size == len(content)
    assert publication.output.xxh3_128 == xxhash.xxh3_128(content).hexdigest()
    assert pending(bucket) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("content", [NEW, LARGE], ids=["small", "large"])
def test_a_failed_upload_leaves_the_old_object_and_nothing_pending(bucket, content):
    publish_bytes("s3://shards/data.bin", OLD)
    with pytest.raises(KeyboardInterrupt), publish("s3://shards/data.bin") as publication:
        publication.write(content)
        begun = pending(bucket)
        raise KeyboardInterrupt
    assert bool(begun) == (content is LARGE)
    del publication
    gc.collect()  # a finalizer may not upload what was left
    assert stored(bucket) == OLD
    assert pending(bucket) == []


@pytest.mark.parametrize("content", [NEW, LARGE], ids=["small", "large"])
def test_store_rejections_name_the_object(bucket, content):
    with pytest.raises(FileNotFoundError, match="bucket") as raised, publish("s3://nowhere/data.bin") as publication:
        publication.write(content)
    assert "s3://nowhere/data.bin" in "".join([str(raised.value), *raised.value.__notes__])


def test_store_without_atomic_publication_is_rejected():
    with pytest.raises(InputError, match=r"sftp://.*s3://"):
        publish_bytes("sftp://host/data.bin", NEW)


@pytest.mark.parametrize("content", [b"", NEW, LARGE.tobytes()], ids=["empty", "small", "large"])
def test_a_copy_within_a_store_is_the_stores_own(bucket, monkeypatch, content):
    publish_bytes("s3://shards/store/a.parquet", content)
    publish_bytes("s3://shards/out/a.parquet", OLD)
    with monkeypatch.context() as patched:
        patched.setattr(S3FileSystem, "_open", None)  # neither read nor written from here
        copy("s3://shards/store/a.parquet", "s3://shards/out/a.parquet")
        copy("s3://shards/store/a.parquet", "s3://shards/new/folder/a.parquet")
    assert stored(bucket, "out/a.parquet") == stored(bucket, "new/folder/a.parquet") == content
    assert pending(bucket) == []


@pytest.mark.parametrize("target", ["s3://shards/out/a.parquet", "memory://copies/a.parquet", "local"])
@pytest.mark.parametrize("source", ["s3://shards/store/a.parquet", "memory://copies/store.parquet", "local"])
def test_a_copy_between_any_two_storages_is_whole(bucket, tmp_path, source, target):
    source = str(tmp_path / "source") if source == "local" else source
    target = str(tmp_path / "new" / "target") if target == "local" else target
    publish_bytes(source, NEW)
    copy(source, target)
    with fsspec.open(target, "rb") as stream:
        assert stream.read() == NEW


@pytest.mark.parametrize(
    ("place", "give"), [("s3://shards", copy), ("memory://copies", copy), ("local", copy), ("local", link)]
)
def test_copying_a_missing_file_names_it(bucket, tmp_path, place, give):
    place = str(tmp_path) if place == "local" else place
    publish_bytes(f"{place}/target", OLD)
    with pytest.raises(FileNotFoundError) as raised:
        give(f"{place}/missing", f"{place}/target")
    assert "missing" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    with fsspec.open(f"{place}/target", "rb") as stream:
        assert stream.read() == OLD


def test_rejected_copy_notes_both_names(bucket):
    publish_bytes("s3://shards/data.bin", NEW)
    with pytest.raises(FileNotFoundError) as raised:
        copy("s3://shards/data.bin", "s3://nowhere/data.bin")
    assert raised.value.__notes__ == ["while copying s3://shards/data.bin to s3://nowhere/data.bin"]
