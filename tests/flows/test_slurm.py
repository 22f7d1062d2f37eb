"""Preparation and training on a real Slurm: jobs that are refused, held, cancelled, out of time and requeued."""

import contextlib
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import orjson
import psutil
import pytest
import yaml

from tests.flows import slurm
from tests.flows.prefect_commands import wait_until
from tests.flows.preparation_runs import DEADLINE, TOKENMILL, finish, start_small
from tests.flows.test_tutorials import follow
from tests.preparing import tree
from tests.preparing_sft import chat_vocabulary
from tests.train import small_data

pytestmark = [pytest.mark.weekly, pytest.mark.skipif(bool(slurm.MISSING), reason=str(slurm.MISSING))]

JOB = {"walltime": "00:30:00", "cores": 1, "processes": 1, "memory": "1GB", "queue": "cpu"}
STEPS = 2_000
TRAINING = [
    *(
        "launcher=slurm",
        "nodes=2",
        "processes=1",
        "device=cpu",
        f"steps={STEPS}",
        "checkpoint_every=100",
        "max_epochs=null",
    ),
    *("sequence_length=64", "global_batch=4", "micro_batch=2"),
    *("model.hidden=32", "model.heads=4", "model.key_value_heads=2", "model.feed_forward=64"),
]

TWO_WORKERS = {"cores": 2, "processes": 2, "memory": "2GB"}


@pytest.fixture(scope="module")
def cluster():
    with slurm.slurm() as found:
        yield found


@pytest.fixture(scope="module")
def on_slurm(cluster, prefect_server):
    """The environment of commands that use both Prefect's server and Slurm."""
    return SimpleNamespace(environment=prefect_server.environment | {"SLURM_CONF": cluster.environment["SLURM_CONF"]})


def published(found):
    return {name: content for name, content in found.items() if not name.startswith("shards/")}


def profile(folder, **chosen):
    options = {"dashboard_address": "127.0.0.1:0"}
    arguments = {**JOB, "log_directory": str(folder / "logs"), "scheduler_options": options, **chosen}
    adapt = {"minimum": 0, "maximum": 2}
    written = {"cluster_class": "dask_jobqueue.SLURMCluster", "cluster_kwargs": arguments, "adapt_kwargs": adapt}
    path = folder / "slurm.yaml"
    path.write_text(yaml.safe_dump(written))
    return str(path)


def start(blend, out, server, profile):
    return start_small(blend, out, server, f"store={out.parent / 'store'}", "--cluster", profile)


def proven(folder):
    return len(list((folder / "store").glob("*/*/receipt.json")))


def read_until(process, words):
    """The first line of stderr with these words."""
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"{words!r} was never said; exit code {process.wait()}")


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ({"queue": "nowhere"}, "sbatch rejects worker jobs: .*Invalid partition name specified; correct queue"),
        ({"queue": "brief"}, r"Slurm will not start job \d+ \(PartitionTimeLimit\); lower walltime"),
        (
            {"python": "/nowhere/python"},
            r"jobs end before their workers join: job \d+ is FAILED, .*/nowhere/python: No such file",
        ),
    ],
)
def test_impossible_cluster_is_reported_with_slurms_words(chosen, complaint, cluster, blend, on_slurm, tmp_path):
    process = start(blend, tmp_path / "out", on_slurm, profile(tmp_path, **chosen))
    _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.search(complaint, said), said
    assert "Traceback" not in said
    assert not cluster.jobs("pending,running")


def test_two_runs_wait_for_drained_nodes_lose_a_job_and_publish_the_same_bytes(
    cluster, blend, expected, on_slurm, tmp_path
):
    cluster.set_nodes("drain")
    try:
        runs = [start(blend, tmp_path / name, on_slurm, profile(tmp_path, **TWO_WORKERS)) for name in ("one", "two")]
        for run in runs:
            assert "its jobs: 1 PENDING" in read_until(run, "waiting for a worker")
    finally:
        cluster.set_nodes("resume")
    wait_until(lambda: proven(tmp_path) > 5, DEADLINE)
    cluster.call("scancel", cluster.jobs("running")[0][0])
    for run in runs:
        finish(run, 2 * DEADLINE)
    assert [published(tree(tmp_path / name)) for name in ("one", "two")] == [published(expected)] * 2
    assert not cluster.jobs("pending,running")


def test_a_job_that_meets_its_time_limit_is_replaced(cluster, blend, expected, on_slurm, tmp_path):
    process = start(
        blend, tmp_path / "out", on_slurm, profile(tmp_path, queue="brief", walltime="00:01:00", **TWO_WORKERS)
    )
    wait_until(lambda: proven(tmp_path) > 2, DEADLINE)
    first = cluster.jobs("running")[0][0]
    hung = [each for each in workers() if each.environ().get("SLURM_JOB_ID") == first]
    for each in hung:  # it would be done before its time is over
        each.suspend()
    wait_until(lambda: [first, "TIMEOUT"] in [job[:2] for job in cluster.jobs()], DEADLINE)
    finish(process, 2 * DEADLINE)
    assert len(hung) > 2
    assert published(tree(tmp_path / "out")) == published(expected)


def workers():
    """The processes of Dask's workers."""
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        with contextlib.suppress(psutil.NoSuchProcess):
            if "distributed.cli.dask_worker" in line or any(
                "distributed.cli.dask_worker" in " ".join(parent.cmdline()) for parent in process.parents()
            ):
                yield process


def test_training_on_two_nodes_is_stopped_resumed_requeued_and_finished(cluster, on_slurm, tmp_path):
    """The same job.sbatch that a user would submit, after a run by `srun` was interrupted."""
    data = small_data.texts(tmp_path, chat_vocabulary(tmp_path / "vocabulary"))[0]
    out = tmp_path / "model"
    command = [TOKENMILL, "train", data, "--output-dir", str(out), *TRAINING]
    with_log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        command, env=on_slurm.environment, stdout=with_log, stderr=with_log, start_new_session=True
    )
    wait_until(lambda: last_checkpoint(out) or process.poll() is not None, 2 * DEADLINE, tmp_path / "log")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130, (tmp_path / "log").read_text()
    wait_until(lambda: not cluster.jobs("pending,running,completing"), DEADLINE)

    stopped = last_checkpoint(out)
    environment = on_slurm.environment | {"TOKENMILL_PYTHON": sys.executable}
    sent = subprocess.run(["sbatch", out / "job.sbatch"], env=environment, check=True, capture_output=True, text=True)
    job = sent.stdout.split()[-1]
    log = out / f"slurm-{job}.log"
    wait_until(lambda: last_checkpoint(out) > stopped, 2 * DEADLINE, log)
    cluster.call("scancel", "--batch", "--signal=USR1", job)  # as Slurm does two minutes before the time limit
    wait_until(lambda: [job, "COMPLETED"] in [each[:2] for each in cluster.jobs()], 3 * DEADLINE, log)

    assert "Restarts=1" in cluster.call("scontrol", "show", "job", job)
    told = [orjson.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    steps = [event["step"] for event in told if event["event"] == "step"]
    assert steps[0] == stopped + 1
    assert set(steps) == set(range(stopped + 1, STEPS + 1))


def last_checkpoint(out):
    """The step of the newest checkpoint, 0 before the first."""
    return max((int(path.name[5:]) for path in out.glob("checkpoints/step_*")), default=0)


def test_slurm_tutorial_works(on_slurm, tmp_path):
    needed = {name: on_slurm.environment[name] for name in ("SLURM_CONF", "PREFECT_API_URL")}
    follow("tutorial-slurm.md", [], tmp_path, **needed)
