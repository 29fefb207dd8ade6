#!/usr/bin/env bash
# tests/huggingface with other versions of Transformers than the one that constraints.txt names.
#
#   scripts/transformers_versions.sh                   the oldest that flce supports
#   scripts/transformers_versions.sh 4.57.6 5.0.0      these, one after the other
#
#   PYTHON=python3.12             the Python to build the environments with
#   WORKERS=2                     processes that the tests run in
#   FLCE_ALL_ARCHITECTURES=1      all architectures instead of a sample
#
# Each version has an environment of its own in .cache, built once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || set -- 4.56.2
# Everything but Transformers and what it pins itself is of the usual version.
mkdir -p .cache
grep -vE '^(transformers|tokenizers|huggingface_hub|hf-xet)\b' constraints.txt >.cache/constraints.txt
for version in "$@"; do
    venv=.cache/transformers-$version
    if [[ ! -e $venv/.installed ]]; then
        "${PYTHON:-python3}" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --constraint .cache/constraints.txt torch
        "$venv/bin/python" -m pip install --quiet --constraint .cache/constraints.txt "transformers==$version" \
            accelerate peft pillow scipy triton hypothesis pytest pytest-timeout pytest-xdist
        touch "$venv/.installed"
    fi
    echo "Transformers $version"
    PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
        "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal tests/huggingface
done
