#!/usr/bin/env bash
# Trains with NeMo-RL: NEMO_RL=<its folder> bash @script@; settings may follow, as in cluster.gpus_per_node=8.
set -euo pipefail
cd "${NEMO_RL:?set it to the folder of NeMo-RL}"
export NEMO_RL="$PWD" # the settings inherit from a file in this folder
exec uv run @program@ --config @config@ "$@"
