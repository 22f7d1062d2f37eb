#!/usr/bin/env bash
# Trains with Megatron-LM: MEGATRON_LM=<its folder> bash @script@@more@
# More arguments may follow and override these. The environment must have tokenmill, too: its module `peer` makes the
# unchanged program use the indices of `tokenmill order` and record what it reads, for `tokenmill verify`.
set -euo pipefail
program="${MEGATRON_LM:?set it to the folder of Megatron-LM, which contains pretrain_gpt.py}/pretrain_gpt.py"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # required to overlap communication

@arrays@
@run@
