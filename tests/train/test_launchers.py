"""Launchers: what they write is what shells, clusters and the trainers of others read, and what they run starts."""

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import yaml
from tokenmill.flows.cli import run as tokenmill
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.events import Failed, Saved
from tokenmill.tasks.train.launchers import launch_of
from tokenmill.tasks.train.launchers.launch import Launch, on_one_machine, require_program
from tokenmill.tasks.train.launchers.nemo_rl import nemo_rl_launch
from tokenmill.tasks.train.watch import run

from tests.peers import nemo_rl_configs
from tests.train.launcher_jobs import ENCODING, FOLDER, HUB, job, phased


@pytest.fixture
def written(tmp_path):
    """Writes the files of a launch to a folder, and names it."""

    def write(launch, folder=tmp_path / "written"):
        folder.mkdir(exist_ok=True)
        for name, text in launch.files.items():
            (folder / name).write_text(text)
        return folder

    return write


@pytest.fixture
def shell(tmp_path):
    """Runs a script with programs of ours in front of those of the system."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def program(name, text):
        place = programs / name
        place.write_text(text)
        place.chmod(place.stat().st_mode | stat.S_IXUSR)

    def environment(**more):
        return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **more}

    def run_script(script, *arguments, **more):
        return subprocess.run(
            ["bash", str(script), *arguments], env=environment(**more), capture_output=True, text=True, check=False
        )

    run_script.program, run_script.environment = program, environment
    return run_script


SAYS_ITS_ARGUMENTS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


@pytest.mark.parametrize(
    "made",
    [
        job(launcher="slurm"),
        job(launcher="slurm", nodes=3, device="cpu"),
        job(launcher="megatron-lm"),
        job(launcher="megatron-lm", nodes=3),
        job(launcher="megatron-bridge", nodes=3),
        job(launcher="megatron-bridge", kind="sft", tokenizer=HUB),
        job(launcher="kubernetes"),
    ],
    ids=lambda made: f"{made.settings.launcher}-{made.settings.nodes}-{made.data.kind}",
)
def test_every_script_is_one_for_its_interpreter(made, written, monkeypatch):
    monkeypatch.setenv("TOKENMILL_IMAGE", "image")
    monkeypatch.setenv("TOKENMILL_CLAIM", "claim:/data")
    launch = launch_of(made, 4)
    folder = written(launch)
    assert launch.files
    for name, text in launch.files.items():
        if name.endswith((".sh", ".sbatch")):
            interpreter = text.splitlines()[0].rpartition("/")[2].split()[-1]
            done = subprocess.run([interpreter, "-n", str(folder / name)], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        elif name.endswith(".py"):
            compile(text, name, "exec")
        else:
            assert list(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    ("launcher", "program", "remedy"),
    [("slurm", "srun", "run this on a login node .* job.sbatch"), ("kubernetes", "kubectl", "install it, .* job.yaml")],
)
def test_a_program_that_is_not_installed_is_named_before_anything_starts(
    launcher, program, remedy, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    for command in ("train", "benchmark"):
        assert tokenmill([command, "data", "--output-dir", str(out), f"launcher={launcher}"]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(
            f"tokenmill: launcher={launcher}: {program} is not on this machine's PATH; {remedy} .*", told
        )
        assert not out.exists()


def test_local_launchers_do_not_need_a_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for launcher in ("local", "megatron-lm", "megatron-bridge", "nemo-rl"):
        require_program(launcher)


# On one machine


def test_a_local_training_is_torchrun_with_the_job_on_this_python():
    launch = launch_of(job(), 3)
    assert launch.runs
    assert launch.command[0] == sys.executable
    assert launch.command[-3:] == ["-m", "tokenmill.tasks.train.trainer", f"{FOLDER}/job.json"]
    assert {"--nproc-per-node=3", "--max-restarts=0"} <= set(launch.command)


def test_processes_share_cores_and_keep_the_environment(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert launch_of(job(), 1).environment == {"OMP_NUM_THREADS": str(cores)}
    assert launch_of(job(), cores * 8).environment == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert launch_of(job(), 1).environment == {"OMP_NUM_THREADS": "77"}


@pytest.mark.slow
def test_two_processes_on_one_machine_start_and_meet(tmp_path):
    script = tmp_path / "meets.py"
    script.write_text(
        "import os, socket, sys\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), 10).close()\n"
        "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "assert size == 2\n"
        "sys.stdout.write(f'rank {rank}\\n')\n"
        f"if rank == 0: print({Saved(step=2, path='x').model_dump_json()!r})\n"
        "assert sys.argv[1:] == ['an argument']\n"
    )
    events, lines = [], []
    command = [sys.executable, *on_one_machine(2, [str(script), "an argument"])]
    run(Launch({}, command, True), events.append, lines.append)
    assert events == [Saved(step=2, path="x")]
    assert {"rank 0", "rank 1"} <= set(lines)


# Slurm


def test_slurm_is_one_srun_that_runs_a_script_on_every_machine():
    launch = launch_of(job(launcher="slurm", nodes=3), 4)
    assert launch.runs
    assert launch.command[0] == "srun"
    assert {"--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=4", "--kill-on-bad-exit=1"} <= set(launch.command)
    assert list(launch.command[-2:]) == ["bash", f"{FOLDER}/node.sh"]
    assert launch.environment == {"TOKENMILL_PYTHON": sys.executable}


def test_slurm_is_not_asked_for_gpus_that_nobody_uses():
    command = launch_of(job(launcher="slurm", device="cpu"), 4).command
    assert "--cpus-per-task=4" in command
    assert not any("gpu" in word for word in command)


@pytest.mark.parametrize(("procid", "is_host"), [(0, "true"), (2, "false")])
def test_the_machines_of_a_slurm_job_meet_at_its_first(written, shell, procid, is_host):
    folder = written(launch_of(job(launcher="slurm", nodes=3), 4))
    shell.program(
        "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames node[07-09]" ] && printf "node07\\nnode08\\nnode09\\n"\n'
    )
    shell.program("a-python", SAYS_ITS_ARGUMENTS)
    slurm = {"SLURM_JOB_NODELIST": "node[01-99]", "SLURM_STEP_NODELIST": "node[07-09]"}
    slurm |= {"SLURM_JOB_ID": "123456", "SLURM_PROCID": str(procid)}
    said = shell(folder / "node.sh", TOKENMILL_PYTHON="a-python", **slurm)
    arguments = orjson.loads(said.stdout)
    assert arguments[:2] == ["-m", "torch.distributed.run"]
    assert arguments[-3:] == ["-m", "tokenmill.tasks.train.trainer", f"{FOLDER}/job.json"]
    values = dict(word[2:].split("=", 1) for word in arguments[2:-3])
    host, port = values.pop("rdzv-endpoint").split(":")
    assert host == "node07"
    assert 1024 < int(port) < 32768
    assert values == {
        "nnodes": "3", "nproc-per-node": "4", "max-restarts": "0", "rdzv-backend": "c10d", "rdzv-id": "123456",
        "rdzv-conf": f"is_host={is_host}",
    }  # fmt: skip


@pytest.mark.parametrize(("cores", "threads"), [("16", "4"), ("2", "1")])
def test_processes_of_a_slurm_job_share_the_cores_they_were_given(written, shell, cores, threads):
    folder = written(launch_of(job(launcher="slurm"), 4))
    shell.program("scontrol", "#!/bin/sh\necho here\n")
    shell.program("python", '#!/bin/sh\necho "$OMP_NUM_THREADS"\n')
    slurm = {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_CPUS_ON_NODE": cores}
    assert shell(folder / "node.sh", OMP_NUM_THREADS="", **slurm).stdout == f"{threads}\n"


SRUN = """#!/bin/bash
save() { for step; do mkdir -p "checkpoints/$step"; done; }
trap 'save $SAVED_AT_THE_END; echo told; exit 143' TERM
save $SAVED
echo "$@"
[ "$SRUN_ENDS" = at-once ] && exit 3
echo ready >&2
while :; do sleep 0.05; done
"""


def batch(folder, shell):
    shell.program("srun", SRUN)
    shell.program("scontrol", '#!/bin/sh\necho scontrol "$@"\n')
    return folder / "job.sbatch"


def test_a_batch_job_asks_for_the_same_and_ends_as_srun_does(written, shell):
    launch = launch_of(job(launcher="slurm", nodes=3), 4)
    script = batch(written(launch), shell)
    options = [shlex.split(line)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=4", "--requeue", "--signal=B:USR1@120"} <= set(options)
    done = shell(script, SRUN_ENDS="at-once")
    assert (done.returncode, done.stdout.strip()) == (3, " ".join(launch.command[1:]))


@pytest.fixture
def batch_job(written, shell, tmp_path):
    """Runs a batch job that saves checkpoints until it is told to end: its exit code, whether it is queued again, and what it
    complained of.
    """
    out = tmp_path / "it's $HOME and 100%"

    def run_until(how, before=(), saved=(), at_the_end=()):
        out.mkdir()
        for name in before:
            (out / "checkpoints" / name).mkdir(parents=True)
        script = batch(written(launch_of(job(launcher="slurm", output_dir=str(out)), 1)), shell)
        steps = {"SAVED": " ".join(saved), "SAVED_AT_THE_END": " ".join(at_the_end)}
        environment = shell.environment(SLURM_JOB_ID="42", SRUN_ENDS="when-told", **steps)
        process = subprocess.Popen(
            ["bash", str(script)], cwd=out, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr.readline() == "ready\n"
        process.send_signal(how)
        said, complained = process.communicate(timeout=20)
        assert "told" in said
        return process.returncode, "scontrol requeue 42" in said, complained

    return run_until


FOURTH = "step_00000004"
BATCH_JOBS = {
    "saved": (signal.SIGUSR1, {"saved": [FOURTH]}, (0, True)),
    "saved at the end": (signal.SIGUSR1, {"at_the_end": [FOURTH]}, (0, True)),
    "saved after others": (signal.SIGUSR1, {"before": [FOURTH], "saved": ["step_00000008"]}, (0, True)),
    "saved with more digits": (signal.SIGUSR1, {"before": ["step_99999999"], "saved": ["step_100000000"]}, (0, True)),
    "nothing saved": (signal.SIGUSR1, {}, (1, False)),
    "nothing new saved": (signal.SIGUSR1, {"before": [FOURTH]}, (1, False)),
    "half saved": (signal.SIGUSR1, {"before": [FOURTH], "saved": [".step_00000008.tmp"]}, (1, False)),
    "cancelled": (signal.SIGTERM, {"saved": [FOURTH]}, (143, False)),
}


@pytest.mark.parametrize("case", BATCH_JOBS)
def test_batch_job_is_requeued_after_a_checkpoint(batch_job, tmp_path, case):
    how, steps, expected = BATCH_JOBS[case]
    code, again, complained = batch_job(how, **steps)
    assert (code, again) == expected
    remedy = f"set checkpoint_every in {tmp_path}/it's $HOME and 100%/job.json to fewer steps"
    assert remedy in complained if code == 1 else complained == ""


# Kubernetes


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("TOKENMILL_IMAGE", "registry/image:1")
    monkeypatch.setenv("TOKENMILL_CLAIM", "files:/data")


def manifests(**settings):
    launch = launch_of(job(launcher="kubernetes", **settings), 8)
    return list(yaml.safe_load_all(launch.files["job.yaml"]))


def test_one_machine_is_a_job_of_one_pod_with_its_gpus(cluster):
    (one,) = manifests()
    assert (one["apiVersion"], one["kind"]) == ("batch/v1", "Job")
    spec, pod = one["spec"], one["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 1, 0)
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["image"] == "registry/image:1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["command"][-1] == f"{FOLDER}/job.json"
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert {mounted[each["name"]]: each for each in pod["volumes"]} == {
        "/data": {"name": "files", "persistentVolumeClaim": {"claimName": "files"}},
        "/dev/shm": {"name": "memory", "emptyDir": {"medium": "Memory"}},
    }


def test_several_machines_find_the_first_by_its_name(cluster):
    service, several = manifests(nodes=3)
    name = several["metadata"]["name"]
    assert (service["kind"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("Service", name, "None")
    labels = several["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert (several["spec"]["completions"], several["spec"]["completionMode"]) == (3, "Indexed")
    pod = several["spec"]["template"]["spec"]
    assert pod["subdomain"] == name
    (container,) = pod["containers"]
    assert {f"--master-addr={name}-0.{name}", "--nnodes=3", "--node-rank=$(NODE_RANK)"} <= set(container["command"])
    assert [each["name"] for each in container["env"]] == ["NODE_RANK"]
    (without_gpus,) = manifests(device="cpu")
    assert without_gpus["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": {"cpu": 8}}


KUBECTL = """#!/bin/sh
# A cluster of one Job: $CLUSTER/calls is what was asked, and $RESULT how the Job ends once its log was shown. Pods are files
# with their logs, all of which a selector matches. They go with the Job when it is deleted in the foreground; otherwise they
# stay until their log was read.
echo "$@" >> "$CLUSTER/calls"
case "$1 $2" in
"delete "*)
    case "$*" in *--cascade=foreground*) rm -f "$CLUSTER"/*.pod ;; esac
    rm -f "$CLUSTER/job"
    ;;
"create "*) echo created; touch "$CLUSTER/job" ;;
"get pods")
    [ -e "$CLUSTER/old.pod" ] && echo Failed
    [ -e "$CLUSTER/asked" ] && echo Running && echo "a line" > "$CLUSTER/new.pod"
    touch "$CLUSTER/asked"
    ;;
"logs "*)
    [ "$RESULT" = unanswered ] && [ ! -e "$CLUSTER/tried" ] && touch "$CLUSTER/tried" && exit 1
    case "$*" in *--tail=0*) ;; *) cat "$CLUSTER"/*.pod ;; esac
    rm -f "$CLUSTER/old.pod"
    [ "$RESULT" = silent ] && exec sleep 60
    [ -e "$CLUSTER/new.pod" ] && touch "$CLUSTER/ended"
    ;;
"get job")
    [ "$RESULT" = unreachable ] && [ -e "$CLUSTER/ended" ] && [ ! -e "$CLUSTER/tried" ] && touch "$CLUSTER/tried" && exit 1
    case "$RESULT" in unreachable | unanswered) RESULT=Complete ;; esac
    [ "$RESULT" = removed ] && [ -e "$CLUSTER/ended" ] && exit 0
    [ -e "$CLUSTER/ended" ] && echo "found $RESULT " || echo "found "
    ;;
esac
"""


@pytest.fixture
def kubectl(cluster, written, shell, tmp_path):
    """Makes a launch whose script talks to a cluster of ours, and names the file with what it was asked."""
    shell.program("kubectl", KUBECTL)
    shell.program("sleep", '#!/bin/sh\n[ "$1" -gt 10 ] && exec /bin/sleep "$1"\nexit 0\n')

    def make(result):
        folder = written(launch_of(job(launcher="kubernetes"), 1))
        environment = shell.environment(CLUSTER=str(tmp_path), RESULT=result)
        return Launch({}, ["sh", str(folder / "job.sh")], True, environment), tmp_path / "calls"

    return make


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("result", ["Complete", "SuccessCriteriaMet Complete", "unreachable", "unanswered"])
def test_a_job_of_kubernetes_is_waited_for_and_its_log_shown(kubectl, tmp_path, result, before):
    """But not that of a pod of the attempt before."""
    if before:
        (tmp_path / "old.pod").write_text(Failed(reason="the attempt before").model_dump_json() + "\n")
    launch, calls = kubectl(result)
    lines = []
    run(launch, lines.append, lines.append)
    assert lines == ["created", "a line"]
    asked = [line.split()[0] for line in calls.read_text().splitlines()]
    assert asked[:2] == ["delete", "create"]
    assert f"--filename {FOLDER}/job.yaml" in calls.read_text()


@pytest.mark.parametrize(("result", "reason"), [("FailureTarget Failed", "failed: kubectl describe job"), ("removed", "removed by someone else")])  # fmt: skip
def test_a_job_of_kubernetes_that_fails_has_failed(kubectl, result, reason):
    lines = []
    with pytest.raises(RuntimeError, match="exit code 1"):
        run(kubectl(result)[0], lines.append, lines.append)
    assert reason in lines[-1]


def test_a_job_of_kubernetes_that_is_no_longer_watched_is_removed(kubectl):
    launch, calls = kubectl("silent")

    def on_line(line):
        if line == "a line":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(launch, lambda event: None, on_line)
    *_, last = calls.read_text().splitlines()
    assert last.startswith("delete ")
    assert "--wait=false" in last


# Megatron-LM


def megatron_lm(made, written, shell, **environment):
    """The words for torchrun, and those for Megatron-LM, when the script runs; its own parser reads them in
    test_launchers_and_peers.py.
    """
    shell.program("python", SAYS_ITS_ARGUMENTS)
    done = shell(written(launch_of(made, 8)) / "train.sh", MEGATRON_LM="/opt/Megatron LM", **environment)
    assert done.returncode == 0, done.stderr
    words = orjson.loads(done.stdout)
    program = words.index("/opt/Megatron LM/pretrain_gpt.py")
    return words[:program], words[program + 1 :]


def value_of(option, words):
    """The word behind an option, None where it is not among the words."""
    return words[words.index(option) + 1] if option in words else None


def test_megatron_lm_is_started_in_processes_that_meet_and_reads_the_blend(written, shell):
    torchrun, said = megatron_lm(job(launcher="megatron-lm"), written, shell)
    assert torchrun == on_one_machine(8, ["-m", "tokenmill.tasks.train.peer", f"{FOLDER}/job.json"])
    assert value_of("--per-split-data-args-path", said) == "/data/pre pared/blend.json"
    assert value_of("--save", said) == value_of("--load", said) == f"{FOLDER}/checkpoints"


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (HUB, "org/tokenizer"),
        ({"model": "/models/folder", "revision": None}, "/models/folder"),
        ({"model": "/models/tokenizer.json", "revision": None}, None),
        ({"model": "org/tokenizer", "revision": "abc"}, None),
        (ENCODING, None),
    ],
)
def test_megatron_lm_is_given_a_tokenizer_that_it_can_find(written, shell, tokenizer, name):
    _, said = megatron_lm(job(launcher="megatron-lm", tokenizer=tokenizer), written, shell)
    assert value_of("--tokenizer-model", said) == name
    assert value_of("--vocab-size", said) == (None if name else "1000")


def test_megatron_lm_gets_its_number_and_arguments(written, shell):
    torchrun, _ = megatron_lm(job(launcher="megatron-lm", nodes=2), written, shell, NODE_RANK="1", MASTER_ADDR="first")
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=first"} <= set(torchrun)
    folder = written(launch_of(job(launcher="megatron-lm"), 1))
    assert orjson.loads(shell(folder / "train.sh", "--lr", "1", MEGATRON_LM="x").stdout)[-2:] == ["--lr", "1"]


def elsewhere(made, path="/data/out", **changed):
    """The job with other data: in another place, or with more files of its first source."""
    data = made.data.model_copy(update={"path": path})
    if changed:
        data = data.model_copy(update={"sources": [*data.sources, data.sources[0].model_copy(update=changed)]})
    return made.model_copy(update={"data": data})


def launched_by(made, launcher):
    return made.model_copy(update={"settings": made.settings.model_copy(update={"launcher": launcher})})


STORED = "s3://bucket/data"
REFUSED = [
    (job(nodes=2), {}, "nodes=2: launcher=local"),
    *(
        (job(launcher=name, output_dir="s3://bucket/out"), {}, f"output_dir=s3://bucket/out: launcher={name} .* name a folder that all")
        for name in ("local", "slurm", "kubernetes", "megatron-lm", "megatron-bridge")
    ),
    *(
        (elsewhere(job(launcher=name, path=files), path), {}, f"launcher={name}: .* {STORED}.* prepare the data again with --output-dir")
        for name in ("megatron-lm", "megatron-bridge")
        for path, files in ((STORED, "/data/store"), ("/data/out", STORED))
    ),
    (job(launcher="megatron-lm", kind="sft"), {}, "packed conversations.*set launcher=megatron-bridge"),
    (job(launcher="megatron-lm", start_from="org/model"), {}, "start_from=org/model.*set launcher=megatron-bridge"),
    (job(launcher="megatron-lm", model={"rope_base": 0.5}), {}, "model.rope_base=0.5"),
    (job(launcher="megatron-bridge", kind="sft"), {}, "'o200k_harmony' is not one"),
    (elsewhere(job(launcher="megatron-bridge", kind="sft", tokenizer=HUB), files=["/elsewhere/00.parquet"]), {}, "packs of train are in 2 folders"),
    (launched_by(phased(), "megatron-bridge"), {}, "has 2 phases, and Megatron-Bridge reads one blend"),
    (job(launcher="nemo-rl"), {}, "launcher=nemo-rl: .* holds pretrain data"),
    (job(launcher="kubernetes"), {"IMAGE": ""}, "TOKENMILL_IMAGE is not set"),
    *((job(launcher="kubernetes"), {"CLAIM": claim}, f"TOKENMILL_CLAIM={claim!r}") for claim in ("", "files", "files:data")),
    (job(launcher="kubernetes", output_dir="/home/me/out"), {}, "output_dir /home/me/out is not in /data"),
    (job(launcher="kubernetes", path="/database/x"), {}, "the data /database/x is not in /data"),
    (job(launcher="kubernetes", start_from="/models/x"), {}, "start_from /models/x is not in /data"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "variables", "reason"), REFUSED, ids=[case[2][:50] for case in REFUSED])
def test_launcher_limits_are_rejected(cluster, monkeypatch, made, variables, reason):
    for name, value in variables.items():
        monkeypatch.setenv(f"TOKENMILL_{name}", value)
    with pytest.raises(InputError, match=f"(?s){reason}"):
        launch_of(made, 8)


def test_object_store_data_does_not_need_a_claim(cluster):
    assert launch_of(job(launcher="kubernetes", path=STORED, start_from="org/model"), 8).runs


# NeMo-RL


def manifest(target, train="/data/splits/train_1.jsonl", val="/data/splits/valid_1.jsonl"):
    return {"settings": {"target": target}, "train": train, "val": val, "test": ""}


NEMO_RL = {
    "nemo_rl_sft": ("examples/run_sft.py", "sft.yaml", "ResponseDataset", "sft_processor", None),
    "nemo_rl_chat": ("examples/run_sft.py", "sft.yaml", "openai_format", "sft_processor", None),
    "nemo_rl_dpo": ("examples/run_dpo.py", "dpo.yaml", "BinaryPreferenceDataset", None, None),
    "nemo_rl_grpo_math": ("examples/run_grpo.py", "grpo_math_1B.yaml", "ResponseDataset", "math_hf_data_processor", "math"),
    "nemo_gym": (
        "examples/nemo_gym/run_grpo_nemo_gym.py", "grpo_workplace_assistant_nemotron_nano_v2_9b.yaml", "NemoGymDataset",
        "nemo_gym_data_processor", "nemo_gym",
    ),
}  # fmt: skip


@pytest.fixture
def nemo_rl(tmp_path, written, monkeypatch):
    """Starts NeMo-RL with what was written for a target, as far as its data."""
    monkeypatch.setenv("NEMO_RL", str(tmp_path / "NeMo RL"))
    nemo_rl_configs.write_examples(tmp_path / "NeMo RL")
    rows = tmp_path / "${rows}" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')

    def start(target, val="", model="org/model", **header):
        launch = nemo_rl_launch(manifest(target, str(rows), val) | header, str(tmp_path / "${out}"), model)
        program = NEMO_RL[target][0]
        assert f"uv run {program} " in launch.files["train.sh"]
        return nemo_rl_configs.start(program, written(launch) / "nemo_rl.yaml"), rows

    return start


@pytest.mark.parametrize("val", ["/data/${splits}/valid_1.jsonl", ""], ids=["validated", "not validated"])
@pytest.mark.parametrize("target", NEMO_RL)
def test_nemo_rl_starts_with_the_rows_and_the_model_and_all_else_as_in_its_example(nemo_rl, tmp_path, target, val):
    _, example, reader, processor, environment = NEMO_RL[target]
    said, rows = nemo_rl(target, val, str(tmp_path / "a ${model}"))
    read = [(each["data_path"], each["dataset_name"]) for each in [*said.train, *said.validation]]
    assert read == [(path, reader) for path in (str(rows), val) if path]
    assert {each.get("processor") for each in said.train} == {processor}
    assert {each.get("env_name") for each in said.train} == {environment}
    config = said.config
    assert config["policy"]["model_name"] == config["policy"]["tokenizer"]["name"] == str(tmp_path / "a ${model}")
    assert config["checkpointing"]["checkpoint_dir"] == str(tmp_path / "${out}/checkpoints")
    assert config["logger"]["log_dir"] == str(tmp_path / "${out}/logs")
    (inherited,) = (each for name, each in nemo_rl_configs.EXAMPLES.items() if name.endswith(f"/{example}"))
    assert said.max_input_seq_length == inherited["policy"]["max_total_sequence_length"]
    batch = {"nemo_gym": 1024, "nemo_rl_grpo_math": 512}.get(target, 32)
    assert config["policy"]["train_global_batch_size"] == batch
    assert config["checkpointing"]["save_period"] == inherited["checkpointing"]["save_period"]
    assert (config["checkpointing"]["metric_name"] is None) == (not val)


def test_nemo_rl_trains_on_conversations_with_their_own_template_and_tools(nemo_rl):
    said, _ = nemo_rl("nemo_rl_chat")
    (read,) = said.train
    assert (read["chat_key"], read["tool_key"], read["use_preserving_dataset"]) == ("messages", "tools", True)
    assert said.config["policy"]["tokenizer"]["chat_template"] == "default"


def test_nemo_gym_is_given_its_model_server_and_no_environment_of_the_examples(nemo_rl):
    (server,) = nemo_rl("nemo_gym")[0].config["env"]["nemo_gym"]["config_paths"]
    assert server.endswith("vllm_model_for_training.yaml")


PREFERENCES = [
    ({"context": [], "completions": [{"rank": 0, "completion": []}]}, "PreferenceDataset"),
    ({"prompt": "p", "chosen": "c", "rejected": "r"}, "BinaryPreferenceDataset"),
    ({"prompt": "p", "chosen": "c", "rejected": "r", "completions": None}, "BinaryPreferenceDataset"),
]


@pytest.mark.parametrize(("row", "reader"), PREFERENCES)
def test_nemo_rl_reads_preferences_in_the_form_that_they_have(tmp_path, row, reader):
    file = tmp_path / "train.jsonl"
    file.write_bytes(orjson.dumps(row) + b"\n{}\n")
    launch = nemo_rl_launch(manifest("nemo_rl_dpo", train=str(file)), FOLDER, "org/model")
    assert yaml.safe_load(launch.files["nemo_rl.yaml"])["data"]["train"]["dataset_name"] == reader


def test_nemo_rl_script_finds_its_settings(written, shell, tmp_path):
    shell.program("uv", '#!/bin/sh\necho "$NEMO_RL"\nprintf "%s\\n" "$@"\n')
    folder = written(nemo_rl_launch(manifest("nemo_rl_chat"), FOLDER, "m"))
    said = shell(folder / "train.sh", "cluster.gpus_per_node=8", NEMO_RL=os.path.relpath(tmp_path)).stdout.splitlines()
    expected = ["run", "examples/run_sft.py", "--config", f"{FOLDER}/nemo_rl.yaml", "cluster.gpus_per_node=8"]
    assert said == [str(Path(tmp_path).resolve()), *expected]


@pytest.mark.parametrize(
    ("given", "out", "reason"),
    [
        (manifest("none"), FOLDER, "target=none"),
        (manifest("nemo_rl_sft", train=""), FOLDER, "lacks a training split"),
        (manifest("nemo_rl_sft", train="/x.jsonl.zst"), FOLDER, "compression=none"),
        (manifest("nemo_rl_dpo", train="s3://b/x.jsonl"), FOLDER, "opens files, but s3://b/x.jsonl is in an object store"),
        (manifest("nemo_rl_sft", val="s3://b/v.jsonl"), FOLDER, "opens files, but s3://b/v.jsonl is in an object store"),
        (manifest("nemo_rl_sft"), "s3://bucket/out", "output_dir=s3://bucket/out: launcher=nemo-rl"),
    ],
)  # fmt: skip
def test_unreadable_rows_for_nemo_rl_are_rejected(given, out, reason):
    with pytest.raises(InputError, match=reason):
        nemo_rl_launch(given, out, "org/model")


@pytest.mark.parametrize("target", NEMO_RL)
def test_rows_in_batches_are_read_in_their_order(nemo_rl, target):
    started, _ = nemo_rl(target, batches={"size": 48})
    assert started.config["data"]["shuffle"] is False
    if target in ("nemo_rl_grpo_math", "nemo_gym"):
        assert started.config["grpo"]["num_prompts_per_step"] == 48
        assert started.config["policy"]["train_global_batch_size"] == 48 * 16
    else:
        assert started.config["policy"]["train_global_batch_size"] == 48


@pytest.mark.parametrize(
    ("steps", "reached", "blends"),
    [(5, None, ["main", "end"]), (5, "3", ["end"]), (5, "5", []), (5, "release", ["main", "end"]), (2, None, ["main"])],
)
def test_megatron_lm_runs_once_per_phase_and_resumes(tmp_path, written, shell, steps, reached, blends):
    made = phased(steps=steps).model_copy(update={"output_dir": str(tmp_path / "out it's")})
    if reached:
        (tmp_path / "out it's/checkpoints").mkdir(parents=True)
        (tmp_path / "out it's/checkpoints/latest_checkpointed_iteration.txt").write_text(reached)
    launch = launch_of(made, 8)
    shell.program("python", SAYS_ITS_ARGUMENTS)
    done = shell(written(launch) / "train.sh", MEGATRON_LM="/opt/Megatron LM")
    assert done.returncode == 0, done.stderr
    runs = [orjson.loads(line) for line in done.stdout.splitlines()]
    read = [value_of("--per-split-data-args-path", run) for run in runs]
    assert read == [f"{tmp_path}/out it's/blend-{name}.json" for name in blends]
    for words in runs:
        assert value_of("--phase-transition-iterations", words) == ("3" if steps > 3 else None)
        lengths = {name: value_of(f"--{name}-samples", words) for name in ("train", "lr-decay", "lr-warmup")}
        warmup = made.settings.optimizer.warmup_steps
        assert lengths == {"train": str(steps * 8), "lr-decay": str(steps * 8), "lr-warmup": str(warmup * 8)}
        assert not {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"} & set(words)
    assert orjson.loads(launch.files["blend-main.json"]) == {
        "train": ["24.0", "/d/0"], "valid": ["1.0", "/data/pre pared/valid/00"], "test": None,
    }  # fmt: skip
