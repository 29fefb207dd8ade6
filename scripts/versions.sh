#!/usr/bin/env bash
# Runs tests with other versions of PyTorch, Triton and Transformers than the versions of constraints.txt.
#
#   scripts/versions.sh newest           the versions of constraints-newest.txt
#   scripts/versions.sh oldest           the versions of constraints-oldest.txt, the oldest that pyproject.toml allows
#   scripts/versions.sh write newest     ask the package index for the newest versions, and write constraints-newest.txt
#   scripts/versions.sh write oldest
#
#   PYTHON=python3.12              the Python to build the environments with
#   WORKERS=2                      processes that the tests run in
#   TESTS="tests"                  all tests, instead of imports, patched models and the operator's grid
#   FLCE_ALL_ARCHITECTURES=1       all architectures instead of a sample
#
# Each environment is in .cache, built once, and again when its file changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
tests=${TESTS:-tests/package/test_import.py tests/core/test_private_names.py tests/package/test_versions.py tests/search tests/huggingface}
with=(torch triton transformers accelerate peft pillow scipy hypothesis pytest pytest-timeout pytest-xdist matplotlib rich typer)

packages_of() { # the packages of an environment, and the versions on which the other versions depend
    case $1 in
        newest) echo "${with[@]}" trl ;;
        oldest) echo "${with[@]}" torch==2.11.0 triton==3.6.0 transformers==4.56.2 'numpy<2.4' ;;
        *) echo "versions.sh: expected newest or oldest, got '$1'" >&2 && exit 2 ;;
    esac
}

write() {
    local scratch packages
    scratch=$(mktemp -d)
    read -ra packages <<<"$(packages_of "$1")"
    "$python" -m venv "$scratch"
    "$scratch/bin/python" -m pip install --quiet --upgrade "${packages[@]}"
    {
        echo "# Written by scripts/versions.sh write $1, for the tests of make test-$1."
        # A local build has a suffix, such as +cpu, that the package index does not have.
        "$scratch/bin/python" -m pip freeze | sed 's/+[a-z0-9.]*$//' | grep -v ' @ '
    } >"constraints-$1.txt"
    rm -r "$scratch"
}

if [[ ${1:-} == write ]]; then
    write "${2:-newest}"
    exit
fi
which=${1:-newest}
read -ra packages <<<"$(packages_of "$which")"
venv=.cache/$which
if [[ ! constraints-$which.txt -ot $venv/.installed || ! -e $venv/.installed ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --constraint "constraints-$which.txt" "${packages[@]}"
    touch "$venv/.installed"
fi
read -ra tests <<<"$tests"
"$venv/bin/python" -c 'import torch, transformers, triton
print(f"PyTorch {torch.__version__}, Triton {triton.__version__}, Transformers {transformers.__version__}")'
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
    "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal "${tests[@]}"
