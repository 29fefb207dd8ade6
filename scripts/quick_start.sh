#!/usr/bin/env bash
# Runs the quick start of README.md unchanged, in a copy of this repository, with a small model and a text. `make
# quick-start` calls this script; PYTHON is an environment that has torch and transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(realpath -s "${PYTHON:-.venv/bin/python}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

git clone --quiet . "$folder/flce"
# A separate environment: pip installs flce there and finds the other packages below it, so torch is not downloaded again.
"$python" -m venv "$folder/environment"
site=$("$folder/environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/below.pth"
export PATH="$folder/environment/bin:$PATH" PYTHONPATH="" HF_HUB_OFFLINE=1

"$python" scripts/quick_start.py "$folder/flce"
cd "$folder/flce"
bash -euxo pipefail quick_start.sh
test -f my-model-tuned/model.safetensors
cd "$folder" # away from the sources, so that the installed package is imported
python -c 'import flce, sys; sys.exit(not flce.__file__.startswith(sys.prefix))'
echo "The quick start works."
