"""The deployment as its users meet it: a real server, a real worker, and the commands that prefect.yaml names."""

import asyncio
import inspect
import json
import os
import re
import sys
import time
import tomllib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import yaml
from jinja2 import Template
from prefect.cli.deploy._models import ConcurrencyLimitSpec, DeploymentConfig, PrefectYamlModel, WorkPoolConfig
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import Settings
from prefect.states import Cancelling, Scheduled
from prefect.types._datetime import now
from prefect.utilities.importtools import from_qualified_name
from pydantic import BaseModel
from tokenmill.flows.deploying import write_project
from tokenmill.flows.deployment_names import setup_environment, with_bare_names
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.nightly.blends import NightlyBlend
from tokenmill.tasks.nightly.stage import announce
from tokenmill.tasks.shards.store import turn_in

from tests.flows.cloning import REPOSITORY, clone_into
from tests.flows.prefect_commands import PREFECT, clean_environment, running, serving, wait_until
from tests.flows.preparation_runs import TOKENMILL, ran
from tests.preparing import blend_of, prepare, write_lines
from tests.tokenize.small_vocabularies import word_piece

NAME = "pretrain-data-prep"

CANCEL_SECONDS = 15
"""Within which a cancelled run must leave no process."""


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory):
    """One for this file alone, on which everything is deployed."""
    with serving(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return clone_into(tmp_path_factory.mktemp("clone"))


def prefect(clone, server, *arguments):
    """Run a Prefect command in the clone; what it printed, with its exit status."""
    return ran(PREFECT, *arguments, cwd=clone, env=server.environment)


def tokenmill_deploy(clone, server):
    """The record of `tokenmill deploy`, and what it said."""
    done = ran(TOKENMILL, "deploy", cwd=clone, env=server.environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["deploy"], done.stderr


@pytest.fixture(scope="module")
def deployed(clone, prefect_server):
    """The deployment as the server knows it, with a worker that waits for runs."""
    environment = prefect_server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"}
    log = clone.with_name("worker.log")
    with running([PREFECT, "worker", "start", "--pool", "tokenmill"], environment, clone, log):
        wait_until(lambda: "started!" in log.read_text(), 60, log)
        tokenmill_deploy(clone, prefect_server)
        yield prefect_server.client().read_deployment_by_name(f"{NAME}/{NAME}")


@pytest.fixture(scope="module")
def prepared(clone, prefect_server, deployed):
    """Output folder and flow run of the command that people type: the bare name, watched to its end."""
    output = clone.with_name("prepared")
    result = prefect(clone, prefect_server, "deployment", "run", NAME, "--watch", "-p", f"output_dir={output}")
    assert result.returncode == 0, result.stdout + result.stderr
    return output, created_run(result.stdout)


def created_run(printed):
    return UUID(re.search(r"UUID: (\S+)", printed)[1])


@pytest.mark.slow
def test_the_bare_name_runs_every_stage_to_completion_with_its_log(prepared, prefect_server):
    _, run = prepared
    states = task_states(prefect_server, run)
    assert {plain(name) for name in states} == {"plan", "tokenize-shards", "join-prefixes", "publish", "report"}
    assert set(states.values()) == {"Completed"}
    messages = messages_of(prefect_server, run)
    assert re.search(r"^tokenize-shards: \d+ shards", messages, re.MULTILINE)
    assert re.search(r"^(\d+)/\1 shards", messages, re.MULTILINE)
    found = prefect_server.client().read_flow_run(run)
    assert found.state.is_completed()
    assert found.name == "tiny-prepared"
    assert {"tokenmill", NAME} <= {*found.tags}


def task_states(server, run):
    """Task run names and their states. The server records task runs from events, a moment after the flow has ended."""
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run]))

    def all_ended():
        found = server.client().read_task_runs(flow_run_filter=of_run)
        ended = any(task.name.startswith("report") for task in found) and all(task.state.is_final() for task in found)
        return {task.name: task.state.name for task in found} if ended else None

    return wait_until(all_ended, 30)


def plain(task_run_name):
    """`tokenize-shards-2` and `plan-3fc` as the names of their tasks."""
    return task_run_name.rpartition("-")[0]


@pytest.mark.slow
def test_the_run_leaves_its_artifacts(prepared, prefect_server):
    output, run = prepared
    found = prefect_server.client().read_artifacts(
        artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    )
    artifacts = {
        re.fullmatch(rf"{NAME}-(progress|datasets|summary|report)-.*prepared-[0-9a-f]{{8}}", artifact.key)[1]: artifact
        for artifact in found
    }
    assert {what: artifact.type for what, artifact in artifacts.items()} == {
        "progress": "progress",
        "datasets": "table",
        "summary": "markdown",
        "report": "markdown",
    }
    assert artifacts["report"].data == f"[file://{output}/report.html](file://{output}/report.html)"
    assert artifacts["progress"].data == 100
    assert artifacts["progress"].description == "join-prefixes: share of source bytes built"
    assert str(output) in artifacts["summary"].data
    rows = {row["dataset"]: row["rows"] for row in json.loads(artifacts["datasets"].data)}
    sources = load_blend(str(REPOSITORY / "blends/tiny.json")).datasets
    assert rows == {source.name: ran("gzip", "-dcf", source.path).stdout.count("\n") for source in sources}


@pytest.mark.slow
def test_flow_slash_deployment_reuses_shards(prepared, clone, prefect_server):
    output, _ = prepared
    result = prefect(clone, prefect_server, "deployment", "run", f"{NAME}/{NAME}", "-p", f"output_dir={output}")
    assert result.returncode == 0, result.stdout + result.stderr
    run = created_run(result.stdout)
    state = wait_until(lambda: final_state(prefect_server, run), 90)
    assert state.is_completed(), state
    assert {plain(name) for name in task_states(prefect_server, run)} == {"plan", "publish", "report"}


def final_state(server, run):
    state = server.client().read_flow_run(run).state
    return state if state.is_final() else None


@pytest.mark.slow
def test_deployments_name_their_folder_and_only_nights_are_limited(deployed, clone, prefect_server):
    (step,) = deployed.pull_steps
    assert step["prefect.deployments.steps.set_working_directory"]["directory"] == str(clone)
    assert deployed.parameters == {"blend": "blends/tiny.json", "output_dir": "output/pretrain"}
    limits = {found.name: found.global_concurrency_limit for found in prefect_server.client().read_deployments()}
    assert {name for name, limit in limits.items() if limit} == {"reprep-changed-blends"}


def start(server, deployment, **parameters):
    """The id of a new run of a deployment."""
    return server.client().create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def messages_of(server, run):
    """What the log of a run says, in one text."""
    logs = server.client().read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])))
    return "\n".join(log.message for log in logs)


@pytest.mark.slow
def test_runs_wait_only_for_others_in_their_folder(deployed, clone, prefect_server):
    """One that is canceled meanwhile ends without a traceback at the worker."""
    taken = str(clone.with_name("taken"))
    log = clone.with_name("worker.log")
    before = len(log.read_text())
    with turn_in(taken, print):
        first = start(prefect_server, deployed, output_dir=taken)
        told = f"waiting for process {os.getpid()} "
        wait_until(lambda: told in messages_of(prefect_server, first), 90)
        second = start(prefect_server, deployed, output_dir=taken)
        wait_until(lambda: told in messages_of(prefect_server, second), 90)
        prefect_server.client().set_flow_run_state(second, Cancelling())
        assert wait_until(lambda: final_state(prefect_server, second), 90).is_cancelled()
        assert not final_state(prefect_server, first)
    assert wait_until(lambda: final_state(prefect_server, first), 120).is_completed()
    wait_until(lambda: "Cancelled flow run" in log.read_text()[before:], 60)
    assert "Traceback" not in log.read_text()[before:]
    assert "initialize plugins" not in log.read_text()[before:]


@pytest.mark.slow
def test_cancelled_run_ends_its_processes_and_is_resumed(deployed, prefect_server, tmp_path):
    """No engine supports WordPiece, so the reference takes long enough to be cancelled while it encodes."""
    rows = [f"{'some words about data ' * 2_000}{row}" for row in range(400)]
    source = write_lines(tmp_path / "some.jsonl", rows)
    chosen = {
        "blend": blend_of(source), "tokenizer": {"model": str(word_piece(tmp_path / "model"))}, "shard_size": 1_000_000,
    }  # fmt: skip
    cancelled = str(tmp_path / "cancelled")
    run = start(prefect_server, deployed, output_dir=cancelled, **chosen)
    wait_until(lambda: [*Path(cancelled).rglob("receipt.json")], 120)
    assert len(processes_of(run)) > 2, "the flow and its workers"
    prefect_server.client().set_flow_run_state(run, Cancelling())
    began = time.monotonic()
    wait_until(lambda: not processes_of(run), CANCEL_SECONDS)
    print(f"workers gone {time.monotonic() - began:.1f} s after the cancellation")
    assert wait_until(lambda: final_state(prefect_server, run), 60).is_cancelled()
    assert not Path(cancelled, "blend.json").exists()
    write_lines(source, rows[:60])  # of the rest, this test would learn nothing
    _, manifest = prepare(chosen.pop("blend"), cancelled, **chosen)
    assert manifest["volatile"]["shards"]["reused"] >= 1


@pytest.mark.slow
def test_an_error_of_the_caller_is_one_sentence_in_the_ui_and_at_the_worker(deployed, clone, prefect_server):
    log = clone.with_name("worker.log")
    before = len(log.read_text())
    run = start(prefect_server, deployed, blend="none.json", output_dir=str(clone.with_name("failed")))
    state = wait_until(lambda: final_state(prefect_server, run), 90)
    assert state.is_failed()
    assert state.message == f"{clone}/none.json: no such blend file"
    assert "Traceback" not in messages_of(prefect_server, run)
    wait_until(lambda: "Finished in state Failed" in log.read_text()[before:] and not processes_of(run), 60)
    assert "Traceback" not in log.read_text()[before:]


@pytest.mark.slow
def test_a_new_version_of_a_pretraining_blend_is_trained_on_if_that_is_switched_on(deployed, clone, prefect_api):
    client = prefect_api.client()
    train = client.read_deployment_by_name("train-model/train-model")
    web, rows = (NightlyBlend("blends/nightly", name) for name in ("pretrain/web", "rl/questions"))
    announce(web, "prepared", "before", [], path="/nights/before")
    EventsWorker.drain_all()
    resumed = prefect(clone, prefect_api, "automation", "resume", "train-after-a-night")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    announce(web, "changed", "2026-11-24", [])
    announce(web, "failed", "2026-11-24", [], error="none")
    announce(rows, "prepared", "2026-11-24", [], path="/nights/rl")
    announce(web, "prepared", "2026-11-24", [], path="/nights/web/2026-11-24")
    EventsWorker.drain_all()
    of_training = DeploymentFilter(id=DeploymentFilterId(any_=[train.id]))
    (run,) = wait_until(lambda: client.read_flow_runs(deployment_filter=of_training), 60)
    client.delete_flow_run(run.id)
    assert run.state.is_scheduled()
    assert run.work_pool_name == "gpu"
    assert run.parameters == train.parameters | {
        "data": "/nights/web/2026-11-24", "output_dir": "output/models/pretrain/web/2026-11-24"
    }  # fmt: skip


def processes_of(run):
    """The processes that work on a run."""
    return [process for process in psutil.process_iter() if flow_run_of(process) == str(run)]


def flow_run_of(process):
    with suppress(psutil.Error):
        return process.environ().get("PREFECT__FLOW_RUN_ID")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (NAME, f"Several deployments are called {NAME!r}; name one of: another-flow/{NAME}, {NAME}/{NAME}"),
        ("pretrain-data-perp", "No deployment is called 'pretrain-data-perp'"),
    ],
)
def test_unclear_bare_name_ends_the_command(deployed, prefect_server, name, message):
    with prefect_server.client() as client:
        twin = client.create_deployment(client.create_flow_from_name("another-flow"), NAME)
    read = with_bare_names(PrefectClient.read_deployment_by_name)
    try:
        with pytest.raises(SystemExit, match=re.escape(message)):
            asyncio.run(read(PrefectClient(api=prefect_server.url), name))
    finally:
        prefect_server.client().delete_deployment(twin)


@pytest.mark.parametrize("words", ["deploy --all", "deployment run"])
def test_plugin_ignores_other_commands_and_a_changed_prefect(words, monkeypatch):
    owner = next(base for base in PrefectClient.__mro__ if "read_deployment_by_name" in vars(base))
    if words == "deployment run":
        monkeypatch.delattr(owner, "read_deployment_by_name")
    before = getattr(PrefectClient, "read_deployment_by_name", None)
    monkeypatch.setattr(sys, "argv", ["prefect", *words.split()])
    setup_environment(ctx=None)
    assert getattr(PrefectClient, "read_deployment_by_name", None) is before


@pytest.mark.slow
def test_plugin_loads_no_extra_modules(clone):
    """Prefect's own modules for plugins aside, because they are what switching plugins on costs."""
    code = "import prefect, sys; print(*sys.modules)"

    def loaded(enabled):
        environment = clean_environment() | {"PREFECT_PLUGINS_ENABLED": enabled}
        return {
            name.split(".")[0] for name in ran(sys.executable, "-c", code, cwd=clone, env=environment).stdout.split()
        }

    assert loaded("true") - loaded("false") == {"tokenmill", "pluggy"}


@pytest.mark.slow
def test_server_rejects_unknown_parameters_and_keeps_large_seeds(deployed, prefect_server):
    with pytest.raises(PrefectHTTPStatusError, match="409") as refused:
        create_run(prefect_server, deployed, nope=1)
    assert "nope" in refused.value.response.json()["detail"]
    run = create_run(prefect_server, deployed, blend={"datasets": [], "_why": 14}, holdout={"seed": 2**64 - 1})
    read = prefect_server.client().read_flow_run(run.id)
    prefect_server.client().delete_flow_run(run.id)
    assert read.parameters["holdout"] == {"seed": 2**64 - 1}


def create_run(server, deployment, **parameters):
    """A run for tomorrow, so that the server checks the parameters and no worker takes it."""
    tomorrow = Scheduled(scheduled_time=now() + timedelta(days=1))
    return server.client().create_flow_run_from_deployment(deployment.id, parameters=parameters, state=tomorrow)


NIGHTLY, EVALUATE = "reprep-changed-blends/reprep-changed-blends", "evaluate-model/evaluate-model"


@pytest.mark.slow
def test_deploying_again_keeps_what_people_changed_and_applies_what_prefect_yaml_changed(
    deployed, clone, prefect_server
):
    client = prefect_server.client()
    nightly = client.read_deployment_by_name(NIGHTLY)
    (schedule,) = nightly.schedules
    assert not schedule.active
    own = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 5 * * 1", timezone="UTC"), active=True)
    client.create_deployment_schedules(nightly.id, [own])
    later = CronSchedule(cron="30 3 * * *", timezone="UTC")
    client.update_deployment_schedule(nightly.id, schedule.id, active=True, schedule=later)
    chosen = DeploymentUpdate(
        parameters={**nightly.parameters, "blends": "s3://bucket/nights", "keep_versions": 3},
        tags=["ours"],
        concurrency_limit=5,
    )
    client.update_deployment(nightly.id, chosen)
    client.pause_deployment(nightly.id)
    before = choices(client, NIGHTLY)

    these = ["--no-prompt", "deploy", "--name", "reprep-changed-blends", "--name", "evaluate-model"]
    again = prefect(clone, prefect_server, *these)
    assert again.returncode == 0, again.stdout + again.stderr
    assert choices(client, NIGHTLY) == before
    record, said = tokenmill_deploy(clone, prefect_server)
    assert record["written"] == []
    assert choices(client, NIGHTLY) == before
    assert "reprep-changed-blends keeps its schedules" in said

    changed = yaml.safe_load((clone / "prefect.yaml").read_text())
    named = {each["name"]: each for each in changed["deployments"]}
    named["reprep-changed-blends"]["parameters"]["output_dir"] = "output/nights"
    named["evaluate-model"] |= {"schedules": [{"cron": "0 1 * * *", "timezone": "UTC"}], "tags": ["scores"]}
    (clone / "changed.yaml").write_text(yaml.safe_dump(changed))
    done = prefect(clone, prefect_server, *these, "--prefect-file", "changed.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert choices(client, NIGHTLY) == before | {"parameters": before["parameters"] | {"output_dir": "output/nights"}}
    evaluate = choices(client, EVALUATE)
    assert [(cron, active) for _, cron, active in evaluate["schedules"]] == [("0 1 * * *", True)]
    assert evaluate["tags"] == ["scores"]


def choices(client, name):
    """What people can change of a deployment."""
    found = client.read_deployment_by_name(name)
    return {
        "paused": found.paused,
        "schedules": sorted((str(each.id), each.schedule.cron, each.active) for each in found.schedules),
        "parameters": found.parameters,
        "tags": found.tags,
        "limit": found.global_concurrency_limit and found.global_concurrency_limit.limit,
    }


def deployments():
    return yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]


@pytest.mark.weekly
@pytest.mark.timeout(900)  # on busy cores
def test_default_parameters_of_deployments_and_automations_succeed(prefect_api, monkeypatch, tmp_path):
    """One after the other, because some read the output of others. `test_train_flow.py` runs the pipeline."""
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    flows = {each["name"]: load_flow_from_entrypoint(each["entrypoint"]) for each in deployments()}
    for each in deployments():
        if each["name"] != "pipeline":
            flows[each["name"]](**each["parameters"])
    night = json.loads(Path("output/nightly/pretrain/tiny/latest.json").read_bytes())["pretrain"]
    event = {"payload": night, "resource": {"name": "pretrain/tiny"}}
    for each in deployments():
        for trigger in each.get("triggers", []):
            chosen = {name: Template(text).render(event=event) for name, text in trigger["parameters"].items()}
            flows[each["name"]](**each["parameters"] | chosen)
    assert Path("output/models/pretrain/tiny", night["version"], "metrics.jsonl").exists()


@pytest.mark.parametrize("deployment", deployments(), ids=lambda deployment: deployment["name"])
def test_entrypoint_and_default_parameters_fit_the_flow(deployment, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    defaults = {name: parameter.default for name, parameter in inspect.signature(flow.fn).parameters.items()}
    flow.validate_parameters(defaults | deployment["parameters"])
    if "blend" in deployment["parameters"]:
        load_blend(deployment["parameters"]["blend"])
    assert flow.name == deployment["name"]
    assert {"tokenmill", flow.name} <= {*deployment["tags"]}


def unknown_keys(written):
    """Keys of a prefect.yaml that Prefect knows nothing of; it would ignore them without a word."""
    yield from written.keys() - keys_of(PrefectYamlModel)
    for deployment in written["deployments"]:
        yield from deployment.keys() - keys_of(DeploymentConfig)
        yield from deployment.get("work_pool", {}).keys() - keys_of(WorkPoolConfig)
        yield from deployment.get("concurrency_limit", {}).keys() - keys_of(ConcurrencyLimitSpec)
    for step in [*written.get("build", []), *written.get("push", []), *written.get("pull", [])]:
        for name, arguments in step.items():
            yield from arguments.keys() - {"id", "requires", *inspect.signature(from_qualified_name(name)).parameters}


def keys_of(model: type[BaseModel]):
    return {field.alias or name for name, field in model.model_fields.items()}


def test_prefect_yaml_has_only_keys_that_prefect_knows():
    assert not list(unknown_keys(yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())))


def test_prefect_toml_has_only_settings_that_prefect_knows():
    assert not list(unknown_settings(Settings, tomllib.loads((REPOSITORY / "prefect.toml").read_text())))


@pytest.mark.slow
def test_readme_server_settings_are_prefects(monkeypatch):
    """Prefect ignores variables that it does not know, and values that mean nothing are an error."""
    block = re.search(
        r"```\n(PREFECT_SERVER_SERVICES_DB_VACUUM.*?)```", (REPOSITORY / "docs/prefect.md").read_text(), re.DOTALL
    )[1]
    for name, value in re.findall(r"^(\w+)=(\S+)", block, re.MULTILINE):
        monkeypatch.setenv(name, value)
    server = Settings().server
    assert "flow_runs" in server.services.db_vacuum.enabled_vacuum_types
    assert server.services.db_vacuum.retention_period == timedelta(days=30)
    assert server.events.retention_period == timedelta(days=3)
    assert server.database.connection_url.get_secret_value().startswith("postgresql+asyncpg://")


def unknown_settings(model, written):
    for name, value in written.items():
        field = model.model_fields.get(name)
        if field is None:
            yield name
        elif isinstance(value, dict):
            yield from unknown_settings(field.annotation, value)
