"""Slurm: one `srun`, which waits for machines, passes on the log, and ends the job when it receives a signal.

`srun` allocates, carries the tasks' output, forwards SIGTERM, and exits with their highest exit code; `sbatch --wait`
would need two more processes for that. Within an allocation (`salloc`) it uses those machines. job.sbatch runs the same
`srun` as a queued job.

Other options of a site (partition, account, time, cores per GPU) come from the environment: `srun` reads SLURM_PARTITION,
SLURM_ACCOUNT, SLURM_TIMELIMIT and SLURM_CPUS_PER_GPU, `sbatch` the same with the prefix SBATCH_. All machines must see the
output folder and the data.
"""

import shlex
import sys

from tokenmill.tasks.storage import join
from tokenmill.tasks.train.job import CHECKPOINTS, JOB, Job

from .launch import TRAINER, Launch, local_folder, script_lines

NODE, BATCH = "node.sh", "job.sbatch"
PYTHON = "TOKENMILL_PYTHON"

NODE_SCRIPT = """\
#!/usr/bin/env bash
# Runs once on every machine of the Slurm job: torchrun, whose processes meet at the job's first machine.
set -euo pipefail

machines=$(scontrol show hostnames "${{SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}}")
first=${{machines%%$'\n'*}}
port=$((15000 + SLURM_JOB_ID % 15000)) # below the ephemeral ports, and usually different for each job
is_host=$([ "$SLURM_PROCID" -eq 0 ] && echo true || echo false)

# The processes share the cores that Slurm assigns.
cores=${{SLURM_CPUS_ON_NODE:-1}}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((cores > {processes} ? cores / {processes} : 1))}}"

exec "${{TOKENMILL_PYTHON:-python}}" -m torch.distributed.run \\
    --nnodes={nodes} \\
    --nproc-per-node={processes} \\
    --max-restarts=0 \\
    --rdzv-backend=c10d \\
    --rdzv-endpoint="$first:$port" \\
    --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-conf="is_host=$is_host" \\
    {program}
"""

BATCH_SCRIPT = """\
#!/usr/bin/env bash
# The same training as a batch job: sbatch {batch}
# It runs TOKENMILL_PYTHON, or the `python` of the environment that submits it.
# Two minutes before its time limit, it is requeued and resumes from its last checkpoint. If it has not saved one, it fails
# instead, because it would repeat the same steps forever.
#SBATCH --job-name=tokenmill-train
{options}
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output={output}
set -uo pipefail

newest() {{ printf '%s\\n' {checkpoints}/step_* | sort --version-sort | tail --lines=1; }}
before=$(newest)

# USR1 and not TERM, because `scancel` also sends TERM, and a cancelled job must not be requeued.
again() {{
    kill -TERM $(jobs -p)
    wait
    if [ "$(newest)" = "$before" ]; then
        echo "no checkpoint was saved within the time limit of this job, so it is not requeued: set checkpoint_every in" \\
            {job} "to fewer steps, or request more time" >&2
        exit 1
    fi
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}}
trap again USR1
trap 'kill -TERM $(jobs -p); wait; exit 143' TERM

# In the background, because a shell handles signals only between commands and in `wait`.
{srun} &
wait $!
"""


def slurm_launch(job: Job, processes: int) -> Launch:
    """Raises InputError for an output folder outside a file system."""
    folder, settings = local_folder(job.output_dir, job.settings.launcher), job.settings
    node = join(folder, NODE)
    asked = [f"--nodes={settings.nodes}", "--ntasks-per-node=1", _devices(job, processes)]
    srun = ["srun", "--job-name=tokenmill-train", *asked, "--kill-on-bad-exit=1", "bash", node]
    program = script_lines([*TRAINER, join(folder, JOB)])
    files = {
        NODE: NODE_SCRIPT.format(nodes=settings.nodes, processes=processes, program=program),
        BATCH: BATCH_SCRIPT.format(
            batch=shlex.quote(join(folder, BATCH)),
            options="\n".join(f"#SBATCH {option}" for option in asked),
            checkpoints=shlex.quote(join(folder, CHECKPOINTS)),
            job=shlex.quote(join(folder, JOB)),
            output=shlex.quote(join(folder, "slurm-%j.log")),
            srun=script_lines(srun),
        ),
    }
    return Launch(files, srun, True, {PYTHON: sys.executable})


def _devices(job: Job, processes: int) -> str:
    return f"--cpus-per-task={processes}" if job.settings.device == "cpu" else f"--gpus-per-node={processes}"
