"""Launchers of tokenmill's own trainer: torchrun on this machine, Slurm, and Kubernetes. Each run is watched here.

**Slurm** is one `srun`, which waits for machines, passes on the log, and ends the job when it receives a signal. `srun`
allocates, carries the tasks' output, forwards SIGTERM, and exits with their highest exit code; `sbatch --wait` would need two
more processes for that. Within an allocation (`salloc`) it uses those machines. job.sbatch runs the same `srun` as a queued job.
Other site options (partition, account, time, cores per GPU) are read from the environment: `srun` reads SLURM_PARTITION,
SLURM_ACCOUNT, SLURM_TIMELIMIT and SLURM_CPUS_PER_GPU, `sbatch` the same with the prefix SBATCH_. All machines must see the
output folder and the data.

**Kubernetes** is a Job with one pod per machine, and a script that starts it, shows its log and exits with its result. Pods of
an Indexed Job have names, so the processes of several machines meet at the first pod, through a headless Service. Kubernetes
doesn't restart: a retry is a new Job that resumes from the checkpoint. The cluster's settings are read from the environment:
TOKENMILL_IMAGE is an image with this package and its extra `train`; TOKENMILL_CLAIM is `claim:/mount/path`, the persistent
volume claim with data and output, and its mount path in pods and on this machine. kubectl takes cluster and namespace from its
context.
"""

import hashlib
import json
import os
import shlex
import sys

import yaml
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import is_local, join
from tokenmill.tasks.train.job import CHECKPOINTS, JOB, Job

from .launch import RUN, TRAINER, Launch, local_folder, on_one_machine, script, script_lines

THREADS = "OMP_NUM_THREADS"

IMAGE, CLAIM = "TOKENMILL_IMAGE", "TOKENMILL_CLAIM"
MANIFEST = "job.yaml"
PORT = 29500  # the port at which processes of several machines meet; it is free, because a pod has its own address

INSTANCE = "app.kubernetes.io/instance"
INDEX = "batch.kubernetes.io/job-completion-index"


def local_launch(job: Job, processes: int) -> Launch:
    """Start torchrun here. Raises InputError for several machines, and for an output folder outside a file system.

    Processes share the cores evenly unless the environment sets their threads: by default each would take all cores, and under
    torchrun a single one.
    """
    if job.settings.nodes > 1:
        raise InputError(
            f"nodes={job.settings.nodes}: launcher=local starts processes on this machine only; set nodes=1, or "
            "launcher=slurm or launcher=kubernetes"
        )
    program = [*TRAINER, join(local_folder(job.output_dir, job.settings.launcher), JOB)]
    threads = os.environ.get(THREADS) or str(max(1, len(os.sched_getaffinity(0)) // processes))
    return Launch({}, [sys.executable, *on_one_machine(processes, program)], True, {THREADS: threads})


def slurm_launch(job: Job, processes: int) -> Launch:
    """Raises InputError for an output folder outside a file system."""
    folder, settings = local_folder(job.output_dir, job.settings.launcher), job.settings
    node, batch = join(folder, "node.sh"), join(folder, "job.sbatch")
    devices = f"--cpus-per-task={processes}" if settings.device == "cpu" else f"--gpus-per-node={processes}"
    asked = [f"--nodes={settings.nodes}", "--ntasks-per-node=1", devices]
    srun = ["srun", "--job-name=tokenmill-train", *asked, "--kill-on-bad-exit=1", "bash", node]
    program = script_lines([*TRAINER, join(folder, JOB)])
    files = {
        "node.sh": script("node.sh", nodes=settings.nodes, processes=processes, program=program),
        "job.sbatch": script(
            "job.sbatch",
            batch=shlex.quote(batch),
            options="\n".join(f"#SBATCH {option}" for option in asked),
            checkpoints=shlex.quote(join(folder, CHECKPOINTS)),
            job=shlex.quote(join(folder, JOB)),
            output=shlex.quote(join(folder, "slurm-%j.log")),
            srun=script_lines(srun),
        ),
    }
    return Launch(files, srun, True, {"TOKENMILL_PYTHON": sys.executable})


def kubernetes_launch(job: Job, processes: int) -> Launch:
    """Raises InputError for missing environment variables, and for paths outside the claim."""
    folder, nodes = local_folder(job.output_dir, job.settings.launcher), job.settings.nodes
    image, claim, mount = _image_and_claim(job)
    name = f"tokenmill-train-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
    program = [*TRAINER, join(folder, JOB)]
    torchrun = [
        *RUN, f"--nnodes={nodes}", f"--nproc-per-node={processes}", "--max-restarts=0", "--node-rank=$(NODE_RANK)",
        f"--master-addr={name}-0.{name}", f"--master-port={PORT}", *program,
    ]  # fmt: skip
    values = {
        "name": name, "nodes": nodes, "image": image, "claim": claim, "mount": mount,
        "command": ["python", *(on_one_machine(processes, program) if nodes == 1 else torchrun)],
        "resources": {"requests": {"cpu": processes}} if job.settings.device == "cpu" else {"limits": {"nvidia.com/gpu": processes}},
    }  # fmt: skip
    literals = {each: json.dumps(value, ensure_ascii=False) for each, value in values.items()}
    manifests = list(yaml.safe_load_all(script(MANIFEST, instance=INSTANCE, index=INDEX, **literals)))
    if nodes == 1:  # one pod has nobody to meet
        del manifests[0], manifests[-1]["spec"]["template"]["spec"]["subdomain"]
    heading = f"# A training run as a Kubernetes Job. Start it with job.sh beside this file, or with kubectl apply --filename {MANIFEST}.\n"
    shell = script("job.sh", manifest=shlex.quote(join(folder, MANIFEST)), name=name, instance=INSTANCE, index=INDEX)
    files = {MANIFEST: heading + yaml.safe_dump_all(manifests, sort_keys=False), "job.sh": shell}
    return Launch(files, ["sh", join(folder, "job.sh")], True)


def _image_and_claim(job: Job) -> tuple[str, str, str]:
    """The container image, and the claim with its mount path, in which all paths of the job must be."""
    image, place = os.environ.get(IMAGE), os.environ.get(CLAIM, "")
    if not image:
        raise InputError(
            f"{IMAGE} is not set: launcher=kubernetes needs the name of an image that contains this package"
        )
    claim, colon, mount = place.partition(":")
    if not (claim and colon and mount.startswith("/")):
        raise InputError(
            f"{CLAIM}={place!r}: launcher=kubernetes needs the persistent volume claim with data and output, and its mount path, "
            "the same here and in the pods; set it to claim:/mount/path"
        )
    mount = mount.rstrip("/")
    paths = {"output_dir": job.output_dir, "the data": job.data.path, "start_from": job.settings.start_from}
    for what, path in paths.items():
        if path and path.startswith("/") and is_local(path) and not path.startswith(f"{mount}/"):
            raise InputError(
                f"{what} {path} is not in {mount}, where {CLAIM} is mounted; move it there, or name a different claim"
            )
    return image, claim, mount
