"""Kubernetes: a Job with one pod per machine, and a script that starts it, shows its log and exits with its result.

Pods of an Indexed Job have names, so the processes of several machines meet at the first pod, through a headless Service.
Kubernetes restarts nothing: a retry is a new Job that resumes from the checkpoint.

The cluster's settings come from the environment: TOKENMILL_IMAGE is an image with this package and its extra `train`;
TOKENMILL_CLAIM is `claim:/mount/path`, the persistent volume claim with data and output, and its mount path in pods and on
this machine. kubectl takes cluster and namespace from its context.
"""

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import is_local, join
from tokenmill.tasks.train.job import JOB, Job

from .launch import RUN, TRAINER, Launch, local_folder, on_one_machine

IMAGE, CLAIM = "TOKENMILL_IMAGE", "TOKENMILL_CLAIM"
MANIFEST, SCRIPT = "job.yaml", "job.sh"
PORT = 29500
"""The port at which processes of several machines meet; it is free, because a pod has its own address."""

INSTANCE = "app.kubernetes.io/instance"
INDEX = "batch.kubernetes.io/job-completion-index"
A_DAY = 86_400

HEADING = """\
# A training as a Kubernetes Job. Start it with {script} beside this file, or with kubectl apply --filename {manifest}.
"""

SCRIPT_TEXT = """\
#!/bin/sh
# Runs the training as a Kubernetes Job: starts it, shows its log, and exits with its result. If a signal ends this script, it
# removes the Job. kubectl's context determines cluster and namespace.
set -eu
manifest={manifest}
job={name}
first={instance}={name},{index}=0

# Delete the Job after its pods, so that the next one cannot start beside them, follow their log and share their checkpoints.
remove() {{ kubectl delete --cascade=foreground --ignore-not-found --filename "$manifest" "$@"; }}

# Follow the log in the background, because a shell handles signals only between commands and in `wait`.
log=
trap 'trap "" TERM INT HUP; [ -z "$log" ] || kill "$log" 2>/dev/null || true; remove --wait=false; exit 143' TERM INT HUP
lines=-1
follow() {{
    kubectl logs --follow --tail="$lines" --selector "$first" | show &
    log=$!
    if wait "$log"; then lines=0; fi # when following again, do not repeat the log
    log=
}}
show() {{ IFS= read -r line && printf '%s\\n' "$line" && exec cat; }} # fails if there is no line
phase() {{ kubectl get pods --selector "$first" --output 'jsonpath={{.items[*].status.phase}}' || true; }}
state() {{
    conditions='jsonpath=found {{.status.conditions[?(@.status=="True")].type}} '
    kubectl get job "$job" --ignore-not-found --output "$conditions" || echo "found " # the cluster may answer next time
}}

remove # the Job of an earlier attempt; waits until it is gone
kubectl create --filename "$manifest"
while :; do
    case "$(phase)" in
    *Running* | *Succeeded* | *Failed*) follow ;; # until the container or the connection ends
    esac
    case "$(state)" in
    *" Complete "*) exit 0 ;;
    *" Failed "*)
        echo "the Job $job failed: kubectl describe job $job" >&2
        exit 1
        ;;
    found*) sleep 2 ;;
    *)
        echo "the Job $job was removed by someone else" >&2
        exit 1
        ;;
    esac
done
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """The container image, and the claim with its mount path."""

    image: str
    claim: str
    mount: str


def kubernetes_launch(job: Job, processes: int) -> Launch:
    """Raises InputError for missing environment variables, and for paths outside the claim."""
    folder, place = local_folder(job.output_dir, job.settings.launcher), _place(os.environ)
    _require_mounted(job, place)
    name = f"tokenmill-train-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
    parts = [_service(name)] * (job.settings.nodes > 1) + [_job(job, processes, name, place)]
    heading = HEADING.format(script=SCRIPT, manifest=MANIFEST)
    script = SCRIPT_TEXT.format(manifest=shlex.quote(join(folder, MANIFEST)), name=name, instance=INSTANCE, index=INDEX)
    files = {MANIFEST: heading + yaml.safe_dump_all(parts, sort_keys=False), SCRIPT: script}
    return Launch(files, ["sh", join(folder, SCRIPT)], True)


def _place(environment: Mapping[str, str]) -> _Place:
    image = environment.get(IMAGE)
    if not image:
        raise InputError(
            f"{IMAGE} is not set: launcher=kubernetes needs the name of an image that contains this package"
        )
    claim, colon, mount = environment.get(CLAIM, "").partition(":")
    if not (claim and colon and mount.startswith("/")):
        raise InputError(
            f"{CLAIM}={environment.get(CLAIM, '')!r}: launcher=kubernetes needs the persistent volume claim with data and output, "
            "and its mount path, the same here and in the pods; set it to claim:/mount/path"
        )
    return _Place(image, claim, mount.rstrip("/"))


def _require_mounted(job: Job, place: _Place) -> None:
    paths = {"output_dir": job.output_dir, "the data": job.data.path, "start_from": job.settings.start_from}
    for what, path in paths.items():
        if path and path.startswith("/") and is_local(path) and not path.startswith(f"{place.mount}/"):
            raise InputError(
                f"{what} {path} is not in {place.mount}, where {CLAIM} is mounted; move it there, or name another claim"
            )


def _service(name: str) -> dict[str, Any]:
    """Give pods DNS names, even before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {INSTANCE: name}},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: name}},
    }


def _job(job: Job, processes: int, name: str, place: _Place) -> dict[str, Any]:
    nodes = job.settings.nodes
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {INSTANCE: name}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": A_DAY,
            "template": {"metadata": {"labels": {INSTANCE: name}}, "spec": _pod(job, processes, name, place)},
        },
    }


def _pod(job: Job, processes: int, name: str, place: _Place) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    container = {
        "name": "trainer",
        "image": place.image,
        "command": ["python", *_torchrun(job, processes, name)],
        "env": [{"name": "NODE_RANK", "valueFrom": index}],
        "resources": _resources(job, processes),
        "volumeMounts": [
            {"name": "files", "mountPath": place.mount},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - shared memory of processes and NCCL; 64 MB by default
        ],
    }
    volumes = [
        {"name": "files", "persistentVolumeClaim": {"claimName": place.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    alone = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    return alone if job.settings.nodes == 1 else {**alone, "subdomain": name}


def _torchrun(job: Job, processes: int, name: str) -> list[str]:
    program = [*TRAINER, join(job.output_dir, JOB)]
    if job.settings.nodes == 1:
        return on_one_machine(processes, program)
    return [
        *RUN, f"--nnodes={job.settings.nodes}", f"--nproc-per-node={processes}", "--max-restarts=0",
        "--node-rank=$(NODE_RANK)", f"--master-addr={name}-0.{name}", f"--master-port={PORT}", *program,
    ]  # fmt: skip


def _resources(job: Job, processes: int) -> dict[str, Any]:
    if job.settings.device == "cpu":
        return {"requests": {"cpu": processes}}
    return {"limits": {"nvidia.com/gpu": processes}}
