#!/usr/bin/env bash
# Runs once on every machine of the Slurm job: torchrun, whose processes meet at the job's first machine.
set -euo pipefail

machines=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")
first=${machines%%$'\n'*}
port=$((15000 + SLURM_JOB_ID % 15000)) # below the ephemeral ports, and usually different for each job
is_host=$([ "$SLURM_PROCID" -eq 0 ] && echo true || echo false)

# The processes share the cores that Slurm assigns.
cores=${SLURM_CPUS_ON_NODE:-1}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > @processes@ ? cores / @processes@ : 1))}"

exec "${TOKENMILL_PYTHON:-python}" -m torch.distributed.run \
    --nnodes=@nodes@ \
    --nproc-per-node=@processes@ \
    --max-restarts=0 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first:$port" \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-conf="is_host=$is_host" \
    @program@
