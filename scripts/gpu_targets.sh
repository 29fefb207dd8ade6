#!/usr/bin/env bash
# Compiles every kernel for other GPUs, with every launch that flce chooses there, and checks that it fits. No GPU is
# needed. `make test` runs a sample.
#
#   scripts/gpu_targets.sh              all GPUs: T4, A100-80GB, RTX-3090, RTX-4090, H200, B200, RTX-5090, MI300X
#   scripts/gpu_targets.sh H200 MI300X  only these
#
# In the environment:
#   PYTHON    the Python to use (python3), with torch and triton
#   WORKERS   devices at the same time (as many as cores)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset TRITON_INTERPRET
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
if [ $# -eq 0 ]; then
    mapfile -t names < <("$python" -c 'from tests.targets import TARGETS; print(*TARGETS, sep="\n")')
    set -- "${names[@]}"
fi
printf '%s\n' "$@" | xargs -P "${WORKERS:-$(nproc)}" -n 1 "$python" -m tests.targets
