#!/usr/bin/env bash
# Trains with Megatron-Bridge, in an environment that has it and tokenmill, such as its container@more@.
set -euo pipefail
exec python @torchrun@ @peer@"$(dirname "$0")/@program@"
