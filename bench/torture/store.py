"""One store, many writers: preparations, nights, pruning and plans at once, under faults; `--count` is in seconds.

Eight loops prepare blends of pretraining and RL that share datasets, into folders of their own and one store. Beside
them one loop runs nights, one prunes, one plans. Where root may, half of them are on another host (a network namespace).
Datasets come in generations, a new one every few seconds, so that all build the same new shards at the same moment.
Some datasets are others that grew, and prefixes are small, so that the same shards are joined into different prefixes.
Every preparation is a process, and two in three meet a fault: SIGKILL at any moment, or one file operation that fails.
What is unreferenced is pruned after seconds rather than days.

What is judged:

* every build of a key has the same receipt (and so bytes) as that of a clean run of the same preparation elsewhere;
* every finished output verifies at once, and again in the end, and is then equal to that of a clean run;
* nothing fails otherwise than by its fault, or because a shard that it reused was pruned, which the same command mends;
* nothing takes longer than `END_SECONDS`;
* once all is pruned, the store holds what the outputs refer to, and nothing else.
"""

import ctypes
import errno
import faulthandler
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.nightly import prune as pruning
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.build import build_batch
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from xxhash import xxh3_128_hexdigest

from bench.torture.processes import each
from tests import building
from tests.building import plan_here, prepare_here
from tests.faults.injection import fail_operation
from tests.flows.standing_clusters import network
from tests.forking import fork
from tests.nightly.nights import Nights
from tests.preparing import blend_of, tree, write_lines
from tests.preparing_rl import write_rows
from tests.tokenize.small_vocabularies import word_piece

COUNT = 600
"""Seconds."""

PREPARERS = 8
GENERATION_SECONDS, GRACE_SECONDS, END_SECONDS = 12.0, 6.0, 120.0
OLDER_ONE_IN, FAULTS_IN_THREE, KILL_WITHIN_SECONDS, FAIL_WITHIN_OPERATIONS = 4, 2, 1.5, 250
SHARD_SIZE, ROWS = 2_000, 120
LONG_AGO = 1_000_000_000

CHUNK, QUIET_PLANS = 40, 20

DONE, FAILED_AS_INTENDED, PRUNED = 0, 3, 4
"""How a preparation ends, as its exit code."""

FAULTS = ("a kill", "a full disk", "an input/output error")
ERRORS = {"a full disk": errno.ENOSPC, "an input/output error": errno.EIO}


@dataclass(frozen=True)
class Work:
    """A preparation: its kind, the datasets of its blend, and its settings besides the store."""

    kind: str
    paths: tuple[str, ...]
    settings: Mapping[str, Any]

    def prepare(self, out: Path, store: Path, build: Callable[..., Any]) -> None:
        """Do it in this process."""
        prepare_here(self.kind, blend_of(*self.paths), out, build, store=str(store), **self.settings)


class Place:
    """The folder of a torture, as each of its processes sees it."""

    def __init__(self, folder: Path, seed: int, began: float, seconds: float) -> None:
        self.folder, self.seed, self.began, self.seconds = folder, seed, began, seconds
        self.night = folder / "night"
        self.store = self.night / "out" / "shards"
        self.hosts = 1

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.began + self.seconds

    def generation(self) -> int:
        """The number of the latest datasets."""
        return int((time.monotonic() - self.began) / GENERATION_SECONDS)

    def work(self, generation: int, number: int) -> Work:
        """One of the preparations of a generation."""
        data, model = self.folder / "data" / str(generation), str(self.folder / "vocabulary")
        general = {"shard_size": SHARD_SIZE, "max_shrink_fraction": 1.0}
        kind, names, settings = WORKS[number]
        if kind == "pretrain":
            general["tokenizer"] = {"model": model}
        return Work(kind, tuple(str(data / f"{name}.jsonl") for name in names), {**general, **settings})

    def outputs(self) -> list[str]:
        """The folders that preparations have published to."""
        return [str(path.parent) for path in sorted(self.folder.glob("outs/*/blend.json"))]

    def log(self, **record: Any) -> None:
        """Add a record to the log of this process."""
        line = json.dumps({"at": time.monotonic(), **record}).encode() + b"\n"
        file = os.open(self.folder / "log" / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line)
        os.close(file)

    def records(self) -> list[dict[str, Any]]:
        """All records; a kill may have cut a last line short."""
        found = []
        for path in sorted((self.folder / "log").iterdir()):
            for line in path.read_bytes().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found


WORKS: Sequence[tuple[str, tuple[str, ...], dict[str, Any]]] = (
    ("pretrain", ("rye", "oats"), {"prefix_size": 3_000}),
    ("pretrain", ("oats", "rye-grown"), {"prefix_size": 5_000}),
    ("pretrain", ("rye-grown", "corn"), {"prefix_size": 3_000}),
    ("pretrain", ("corn", "rye"), {}),
    ("rl", ("sums", "questions"), {}),
    ("rl", ("sums",), {}),
)
"""Kinds, datasets and settings of the preparations of a generation."""

OUTPUTS = PREPARERS * len({kind for kind, *_ in WORKS}) + 1
"""The folders that are published to: for each preparer one of each kind, and the one that is planned. Then pruning begins."""


def run(count: int, seed: int) -> str:
    """Torture a store for `count` seconds. Raises AssertionError for the first thing that does not hold."""
    with tempfile.TemporaryDirectory() as name, patch.dict("os.environ", {"XDG_CACHE_HOME": f"{name}/cache"}):
        folder = Path(name)
        lay_out(folder, int(count / GENERATION_SECONDS) + 1)
        place = Place(folder, seed, time.monotonic(), count)
        with hosts() as (place.hosts, enter):
            loops = {
                **{
                    f"preparer {number}": partial(prepare_again_and_again, place, number) for number in range(PREPARERS)
                },
                "nights": partial(nights, place),
                "prune": partial(prune_again_and_again, place),
                "plans": partial(plans, place),
            }
            children = {
                fork(partial(begin, enter, number, loop)): name for number, (name, loop) in enumerate(loops.items())
            }
            await_all(children, place)
        return judge(place)


@contextmanager
def hosts() -> Iterator[tuple[int, Callable[[int], None]]]:
    """How many hosts there are, and what moves a process with an odd number to the other one."""
    if os.geteuid() or not shutil.which("ip"):
        yield 1, lambda _: None
        return
    with network([2]) as found:

        def enter(number: int) -> None:
            if number % 2:
                with Path(f"/run/netns/{found.bridge}n2").open() as namespace:
                    assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0

        yield 2, enter


def begin(enter: Callable[[int], None], number: int, loop: Callable[[], None]) -> None:
    """A loop, in a process of its own session."""
    os.setsid()
    enter(number)
    loop()


def await_all(children: dict[int, str], place: Place) -> None:
    """Wait until all loops have ended well. Raises AssertionError for one that has not, and ends the others."""
    try:
        while children:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                time.sleep(0.1)
                late = time.monotonic() - place.began - place.seconds
                assert late < 2 * END_SECONDS, f"waits for ever: {sorted(children.values())}"
            elif ended in children:
                name = children.pop(ended)
                assert status == 0, f"{name} ended with status {status}; see its traceback on stderr"
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


# The loops.


def prepare_again_and_again(place: Place, number: int) -> None:
    """Prepare one blend after the other into one folder, each again until it is done, under faults."""
    source = random.Random(f"{place.seed}-{number}")
    for work, (kind, *_) in enumerate(WORKS):
        if kind not in {before for before, *_ in WORKS[:work]}:
            prepare_under(place, 0, work, number, source)
    while not place.over:
        older = place.generation() and not source.randrange(OLDER_ONE_IN)
        generation = source.randrange(place.generation()) if older else place.generation()
        work = source.randrange(len(WORKS))
        prepare_under(place, generation, work, number, source)


def prepare_under(place: Place, generation: int, work: int, number: int, source: random.Random | None) -> None:
    """Prepare until it is done, into the folder of a preparer for this kind."""
    out = place.folder / "outs" / f"{number}-{WORKS[work][0]}"
    while attempt(partial(prepared, place, generation, work, out), place, source) != DONE:
        pass


def prepared(place: Place, generation: int, number: int, out: Path) -> None:
    """A preparation, and whether its output verifies at once."""
    began, chosen = time.monotonic(), place.work(generation, number)
    chosen.prepare(out, place.store, partial(logged_build, place))
    shards = json.loads((out / "manifest.json").read_bytes())["volatile"]["shards"]
    place.log(finished=[generation, number, str(out)], seconds=time.monotonic() - began, reused=shards["reused"])
    found = verify(str(out), inspector_of(chosen.kind))
    assert not found.problems, found.problems


def attempt(work: Callable[[], None], place: Place, source: random.Random | None) -> int:
    """Do the work in a process that perhaps meets a fault; its exit code. Raises AssertionError if it fails otherwise."""
    fault = source.choice(FAULTS) if source and source.randrange(3) < FAULTS_IN_THREE else None
    moment = source.uniform(0, KILL_WITHIN_SECONDS) if source else 0.0
    operation = source.randrange(1, FAIL_WITHIN_OPERATIONS) if source else 0
    began = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(met(work, ERRORS.get(fault or ""), operation))
    if fault == "a kill":
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert fault == "a kill"
        place.log(met=fault)
        return FAILED_AS_INTENDED
    code = os.waitstatus_to_exitcode(status)
    assert code in {DONE, FAILED_AS_INTENDED, PRUNED}, "see the traceback above"
    assert time.monotonic() - began < END_SECONDS
    place.log(**({"met": fault} if code == FAILED_AS_INTENDED else {"pruned": 1} if code == PRUNED else {"ended": 1}))
    return code


def met(work: Callable[[], None], error: int | None, operation: int) -> int:
    """The exit code of the work, of which one file operation may fail."""
    faulthandler.dump_traceback_later(END_SECONDS, exit=True)
    fault = OSError(error, os.strerror(error)) if error else None
    try:
        with fail_operation(operation if fault else 0, fault or OSError()):
            work()
    except OSError as raised:
        if raised is fault:
            return FAILED_AS_INTENDED
        traceback.print_exc()
        return 1
    except RunError as raised:
        if "run the same command again" in str(raised):
            return PRUNED
        traceback.print_exc()
        return 1
    except BaseException:  # noqa: BLE001 - a forked child must not return into the caller's stack
        traceback.print_exc()
        return 1
    return DONE


def logged_build(place: Place, step: Any, pending: Any, store: Store, arguments: Any, *, rebuild: bool = False) -> Any:
    """As `tests.building.build_here`, with a record of every build."""
    made = step.building(arguments)

    def build(shard: Any, into: Store) -> Receipt:
        began = time.monotonic()
        receipt = made(shard, into)
        place.log(built=[f"{into.kind} {receipt.key}", digest(receipt)], began=began)
        return receipt

    def announce(record: Mapping[str, Any]) -> None:
        if record["reused"]:
            place.log(reused=1)

    return build_batch(pending, store, build, announce, rebuild=rebuild)


def digest(receipt: Receipt) -> str:
    """A hash of everything in a receipt that equal builds have in common, the hashes of its files included."""
    kept = {name: value for name, value in json.loads(receipt.dump()).items() if name != "volatile"}
    return xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())


def nights(place: Place) -> None:
    """Nights over blends whose data grow, with pruning in the end of each."""
    source = random.Random(f"{place.seed}-nights")
    night = Nights(place.night)
    night.settings(
        "defaults",
        tokenizer={"model": str(place.folder / "vocabulary")},
        shard_size=SHARD_SIZE,
        max_shrink_fraction=1.0,
    )
    for number in itertools.count():
        night.append("recent", texts(f"night {number}", 20))
        while attempt(partial(one_night, night, place, number), place, source) != DONE:
            pass
        if place.over:
            return


def one_night(night: Nights, place: Place, number: int) -> None:
    """A night, whose preparations keep what others have published."""
    day = f"2027-{1 + number // 28 % 12:02}-{1 + number % 28:02}"
    data = place.folder / "data" / str(place.generation())
    (night.blends / "pretrain" / "shared.json").write_text(
        json.dumps(blend_of(data / "rye.jsonl", data / "corn.jsonl"))
    )
    made = night.run(day, keep=2, grace_seconds=GRACE_SECONDS, also_keep=place.outputs())
    place.log(night=len(made), removed=len(night.leftovers.removable))


def prune_again_and_again(place: Place) -> None:
    """Prune, with kills and faults too."""
    source = random.Random(f"{place.seed}-prune")
    while not place.over:
        if len(place.outputs()) == OUTPUTS:
            attempt(partial(prune_once, place), place, source)
        time.sleep(source.uniform(0, 2))


def prune_once(place: Place, grace_seconds: float = GRACE_SECONDS) -> None:
    """Keep what is published; no night runs meanwhile."""
    with pruning.alone_with(str(place.store)):
        versions = [str(path.parent) for path in (place.night / "out").glob("*/*/*/blend.json")]
        found = pruning.prune(str(place.store), [*place.outputs(), *versions], grace_seconds)
    place.log(removed=len(found.removable))


def plans(place: Place) -> None:
    """Plan the blend of a folder of one's own, that is published, again and again."""
    while attempt(partial(prepared, place, 0, 0, place.folder / "outs" / "plans"), place, None) != DONE:
        pass
    for seconds in planning(place):
        place.log(plan=seconds)
        if place.over:
            return
        time.sleep(0.2)


def planning(place: Place) -> Iterator[float]:
    """The seconds of each of many plans of what is proven."""
    work, out = place.work(0, 0), place.folder / "outs" / "plans"
    while True:
        began = time.monotonic()
        planned = plan_here(work.kind, blend_of(*work.paths), out, store=str(place.store), **work.settings)
        yield time.monotonic() - began
        assert not planned.plan.pending, f"lost, of a published output: {[shard.key for shard in planned.plan.pending]}"


# The data.


def lay_out(folder: Path, generations: int) -> None:
    """Folders, a vocabulary, and the data of all generations."""
    for name in ("log", "outs", "data"):
        (folder / name).mkdir()
    word_piece(folder / "vocabulary")
    for generation in range(generations + 1):
        data = folder / "data" / str(generation)
        data.mkdir()
        for name in ("rye", "oats", "corn"):
            old(write_lines(data / f"{name}.jsonl", texts(f"{name} {generation}", ROWS)))
        old(write_lines(data / "rye-grown.jsonl", texts(f"rye {generation}", 2 * ROWS)))
        for name in ("sums", "questions"):
            rows = [
                {"question": text, "answer": str(number)}
                for number, text in enumerate(texts(f"{name} {generation}", ROWS))
            ]
            old(write_rows(data / f"{name}.jsonl", rows))


def texts(name: str, count: int) -> list[str]:
    """Rows of some 80 bytes."""
    return [
        f"{name} {number} says hello to the {number * 7919 % 1000}th world and to all its people"
        for number in range(count)
    ]


def old(path: Path) -> Path:
    """The file, as it was written long ago, so that its hash is remembered."""
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


# The judge.


def judge(place: Place) -> str:
    """What was done, in a sentence. Raises AssertionError for the first thing that does not hold."""
    records = sorted(place.records(), key=lambda record: record["at"])
    finished = [tuple(record["finished"]) for record in records if "finished" in record]
    works = sorted({(generation, number) for generation, number, _ in finished})
    clean: dict[str, Any] = {}
    for made in each(
        partial(clean_run, place), [works[start : start + CHUNK] for start in range(0, len(works), CHUNK)]
    ):
        clean |= made
    built = [record for record in records if "built" in record]
    other = {
        record["built"][0]
        for record in built
        if clean.get(record["built"][0], record["built"][1]) != record["built"][1]
    }
    assert not other, f"built to other bytes than in a clean run: {sorted(other)}"
    compared = sum(record["built"][0] in clean for record in built)
    judge_outputs(place, {out: clean[f"{generation} {number}"] for generation, number, out in finished})
    judge_store(place)
    return summary(place, records, built, compared)


def clean_run(place: Place, works: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The digests of the receipts and of the outputs of works that nothing disturbs, in a store of their own."""
    with tempfile.TemporaryDirectory() as name:
        out, store, found = Path(name, "out"), Path(name, "store"), {}
        for generation, number in works:
            place.work(generation, number).prepare(out, store, building.build_here)
            found[f"{generation} {number}"] = digests_of_files(out)
            shutil.rmtree(out)
        for path in store.glob("*/*/receipt.json"):
            receipt = Receipt.load(path.read_bytes())
            found[f"{path.parent.parent.name} {receipt.key}"] = digest(receipt)
        return found


def digests_of_files(out: Path) -> dict[str, str]:
    """A hash of each published file."""
    return {name: xxh3_128_hexdigest(content) for name, content in tree(out).items()}


def judge_outputs(place: Place, expected: Mapping[str, Mapping[str, str]]) -> None:
    """Everything published verifies, and is what a clean run publishes."""
    versions = [str(path.parent) for path in (place.night / "out").glob("pretrain/*/*/blend.json")]
    for out in [*place.outputs(), *versions]:
        kind = json.loads(Path(out, "manifest.json").read_bytes())["type"]
        found = verify(out, inspector_of(kind))
        assert not found.problems, found.problems
        files = digests_of_files(Path(out))
        different = {name for name, _ in files.items() ^ expected.get(out, files).items()}
        assert not different, f"{out}: not what a clean run publishes: {sorted(different)}"


def judge_store(place: Place) -> None:
    """Once all is pruned, every shard is proven and referred to, and nothing else is there."""
    prune_once(place, grace_seconds=-1.0)
    versions = [str(path.parent) for path in (place.night / "out").glob("pretrain/*/*/blend.json")]
    for kind, keys in pruning.references(str(place.store), [*place.outputs(), *versions]).items():
        store = Store(str(place.store), kind)
        lost = keys - store.proven(keys).keys()
        assert not lost, f"lost: {kind} {sorted(lost)}"
        assert set(store.keys()) <= keys, f"left behind: {kind} {sorted(set(store.keys()) - keys)}"


def summary(
    place: Place, records: Sequence[Mapping[str, Any]], built: Sequence[Mapping[str, Any]], compared: int
) -> str:
    """Counts and times."""
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in built:
        spans[record["built"][0]].append((record["began"], record["at"]))
    raced = sum(any(a[0] < b[1] and b[0] < a[1] for a, b in itertools.combinations(of, 2)) for of in spans.values())
    faults = Counter(record["met"] for record in records if "met" in record)
    count = Counter(name for record in records for name in record.keys() & {"finished", "pruned", "night"})
    reused = sum(record.get("reused", 0) for record in records)
    removed = sum(record.get("removed", 0) for record in records)
    under = [record["plan"] for record in records if "plan" in record]
    quiet = list(itertools.islice(planning(place), QUIET_PLANS))
    latency = ", ".join(
        f"{name} {np.percentile(times, 50):.2f} s, p99 {np.percentile(times, 99):.2f} s"
        for name, times in (("while others publish", under), ("alone", quiet))
    )
    return (
        f"{count['finished']:,} preparations and {count['night']:,} nights on {place.hosts} hosts met "
        f"{', '.join(f'{number:,} x {fault}' for fault, number in sorted(faults.items()))}; "
        f"{len(built):,} shards built ({len(spans):,} keys, {raced:,} raced), {reused:,} reused, {removed:,} pruned; "
        f"{count['pruned']:,} runs repeated because of that; {compared:,} builds equal to clean runs; "
        f"{len(under):,} plans: {latency}"
    )
