"""The flow and the command of every kind: on Dask workers with a Prefect server, and in this process without, the same bytes."""

import json
import os
import signal
from contextlib import suppress

import pytest
import yaml
from distributed import Client
from tokenmill.flows.preparation import preparation_flow
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.shards.kinds import KINDS
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify

from tests.flows.preparation_runs import called
from tests.kinds.preparations import sample
from tests.preparing import tree

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KINDS)
def prepared(request, tmp_path_factory):
    """A sample of each kind, prepared in this process: `whole` is what is in `out`."""
    with sample(request.param, tmp_path_factory.mktemp(request.param)) as found:
        found.run()
        found.whole = tree(found.out)
        yield found


def run(prepared, blend, out, **more):
    return preparation_flow(prepared.kind)(blend, str(out), return_state=True, **prepared.settings, **more)


def reweighted(blend):
    """The blend with another weight; a folder of rows has none."""
    changed = json.loads(json.dumps(blend))
    if isinstance(changed, dict):
        changed["datasets"][0]["weight"] = 7.0
    return changed


def die_once(marker):
    """On a Dask worker: the first of all workers to have built a shard is killed before it proves it."""
    issue = Store.issue

    def issue_or_die(*arguments, **named):
        Store.issue = issue
        with suppress(FileExistsError):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
        return issue(*arguments, **named)

    Store.issue = issue_or_die


def test_workers_make_the_same_bytes_and_weights_rebuild_no_shard(prepared, dask_cluster, tmp_path, prefect_api):
    out, marker, deadly = tmp_path / "out", tmp_path / "killed", prepared.kind == "rl"
    if deadly:
        with Client(dask_cluster) as client:
            client.wait_for_workers(2)
            client.run(die_once, str(marker))
    state = run(prepared, prepared.blend, out, cluster=dask_cluster)
    assert state.is_completed()
    assert marker.exists() == deadly
    assert tree(out) == prepared.whole
    ((kind, record),) = state.result().items()
    assert (kind, record["type"], record["path"]) == (prepared.kind, prepared.kind, str(out))
    assert record["shards"]["built"] == record["shards"]["total"] > 1
    assert record["rows"] == record["documents"] + sum(record["dropped"].values())
    assert verify(str(out), inspector_of(str(out))).problems == []
    again = run(prepared, reweighted(prepared.blend), out, cluster=dask_cluster).result()[kind]
    assert again["shards"] == {**record["shards"], "built": 0, "reused": record["shards"]["total"]}


def test_the_command_plans_and_prepares_without_prefect(prepared, tmp_path):
    out, blend = tmp_path / "out", prepared.blend
    if isinstance(blend, dict):
        (tmp_path / "blend.json").write_text(json.dumps(blend))
        blend = tmp_path / "blend.json"
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(prepared.settings))
    words = [*KINDS[prepared.kind].command.split(), blend, "--output-dir", out, "--config", tmp_path / "settings.yaml"]

    def pending():
        planned = called(*words, "--dry-run")
        assert planned.returncode == 0, planned.stderr
        return json.loads(planned.stdout)["plan"]["shards"]["pending"]

    assert pending() > 1
    if prepared.kind == "nll":
        return  # its workers import torch; `test_score_flow` runs the command
    done = called(*words)
    assert done.returncode == 0, done.stderr
    assert tree(out) == prepared.whole
    assert pending() == 0
