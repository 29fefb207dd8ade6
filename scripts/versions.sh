#!/usr/bin/env bash
# Runs tests with other versions of PyTorch, Triton and Transformers than the versions of constraints.txt.
#
#   scripts/versions.sh newest           the versions of requirements-newest.txt
#   scripts/versions.sh oldest           the versions of requirements-oldest.txt, the oldest that pyproject.toml allows
#   scripts/versions.sh write newest     ask the package index for the newest versions, and write requirements-newest.txt
#   scripts/versions.sh write oldest
#   scripts/versions.sh write ci         write requirements-ci.txt: the versions of constraints.txt, with hashes
#   scripts/versions.sh write dist       write requirements-dist.txt: the packages of make dist, with hashes
#
#   PYTHON=python3.12              the Python to build the environments with
#   WORKERS=2                      processes that the tests run in
#   TESTS="tests"                  all tests, instead of imports, patched models and the operator's grid
#   ALL_ARCHITECTURES=1       all architectures instead of a sample
#
# Each environment is in .cache, built once, and again when its file changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
tests=${TESTS:-tests/package/test_import.py tests/core/test_private_names.py tests/package/test_versions.py tests/package/test_safety.py tests/search tests/torch_ops/test_torch_features.py::test_graphs_for_many_lengths tests/huggingface}
with=(torch triton transformers accelerate peft pillow scipy hypothesis pytest pytest-timeout pytest-xdist matplotlib rich typer)

which=${!#}
options=(--python-version 3.11 -)
case $which in
    newest) packages=("${with[@]}" trl) ;;
    oldest) packages=("${with[@]}" torch==2.11.0 triton==3.6.0 transformers==4.56.2 'numpy<2.4') ;;
    ci) packages=() options=(--python-version 3.10 --constraint constraints.txt --extra dev pyproject.toml) ;;
    dist) packages=(build==1.6.1 cyclonedx-bom==7.5.0 setuptools==84.2.1) ;;
    *) echo "versions.sh: expected newest or oldest, or write newest, oldest, ci or dist, got '$*'" >&2 && exit 2 ;;
esac

if [[ $1 == write ]]; then # versions and hashes of all packages and of what they need, for each platform
    "$python" -m venv .cache/uv
    .cache/uv/bin/python -m pip install --quiet uv==0.13.9
    printf '%s\n' "${packages[@]}" | .cache/uv/bin/uv pip compile --quiet --no-python-downloads --universal --upgrade \
        --generate-hashes --no-annotate --custom-compile-command "scripts/versions.sh write $which" \
        --output-file "requirements-$which.txt" "${options[@]}"
    exit
fi
venv=.cache/$which
if [[ ! requirements-$which.txt -ot $venv/.installed || ! -e $venv/.installed ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --require-hashes --requirement "requirements-$which.txt"
    touch "$venv/.installed"
fi
read -ra tests <<<"$tests"
"$venv/bin/python" -c 'import torch, transformers, triton
print(f"PyTorch {torch.__version__}, Triton {triton.__version__}, Transformers {transformers.__version__}")'
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
    "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal "${tests[@]}"
