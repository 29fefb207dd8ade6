#!/usr/bin/env bash
# What needs a GPU, in calls of less than nine minutes.
#
#   scripts/gpu_session.sh                    the tests, then the benchmark; results in ./results, or in $OUT
#   scripts/gpu_session.sh tests              only the tests
#   scripts/gpu_session.sh benchmark          only the benchmark of the operator
#   scripts/gpu_session.sh model              the benchmark of whole models, for a call of its own
#
# A part that fails does not stop the next; the exit status says whether one did. In the environment:
#   PYTHON    the Python to use (python3), with torch, triton, pytest, typer, rich and matplotlib; for models
#             transformers as well
#   WORKERS   processes that the tests run in (as many as cores, 12 at most)
#   PRESET    what the benchmarks measure (h200); "tiny" also runs where there is no GPU
#   ARGS      more arguments for the benchmark of models, such as "--budget-mib 512 --model Qwen3-0.6B"
#   WHEELS    folder with wheels of the peers to compare with (.whl); if it exists, for this run only
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

out=${OUT:-results}
python=${PYTHON:-python3}
cores=$(nproc)
workers=${WORKERS:-$((cores < 12 ? cores : 12))}
preset=${PRESET:-h200}
wheels=${WHEELS:-.whl}
parts=${*:-tests benchmark}

mkdir -p "$out" || exit
unset TRITON_INTERPRET
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0
lines=()

# part NAME SECONDS COMMAND...: runs it with its output in $out/NAME.log; interrupts it when the time is up,
# so that it can still say what it has.
part() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "== $name: $*"
    timeout --signal=INT --kill-after=20 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    case $status in
        0) lines+=("ok      $name, $((SECONDS - start)) s") ;;
        124 | 137) lines+=("FAILED  $name: stopped after its $limit s") ;;
        *) lines+=("FAILED  $name: exit status $status, $((SECONDS - start)) s") ;;
    esac
    [ "$status" -eq 0 ] || failed=1
}

# figures NAME: the table and the picture of $out/NAME.json.
figures() {
    if [ -f "$out/$1.json" ]; then
        "$python" -m benchmarks table "$out/$1.json" --out "$out/$1.md" || failed=1
        "$python" -m benchmarks plot "$out/$1.json" --out "$out/$1.png" || failed=1
    fi
}

if compgen -G "$wheels/*.whl" >/dev/null; then
    site=${TMPDIR:-/tmp}/site
    if "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl; then
        PYTHONPATH="$PYTHONPATH:$site"
    else
        lines+=("FAILED  the wheels in $wheels could not be installed: no peers from there")
        failed=1
    fi
fi

question='import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")'
device=$("$python" -c "$question") || exit
if [ -z "$device" ] && [ "$preset" != tiny ]; then
    echo "There is no CUDA device here." >&2
    exit 2
fi
lines+=("device  ${device:-none}")

for name in $parts; do
    case $name in
        tests)
            # First what only a GPU can test, then the suite that runs everywhere, on the GPU.
            tests=("$python" -m pytest -q --tb=short --maxfail=30 -p no:cacheprovider)
            tests+=(-n "$workers" --dist worksteal)
            export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
            part tests-gpu 100 "${tests[@]}" -m gpu tests
            part tests-all 140 "${tests[@]}" -m "not gpu" tests
            unset OMP_NUM_THREADS TORCHINDUCTOR_COMPILE_THREADS
            ;;
        benchmark)
            part benchmark 270 "$python" -m benchmarks operator --preset "$preset" --errors --deadline 225 \
                --out "$out/operator.json"
            figures operator
            ;;
        model)
            # Past the deadline a step that has begun is still finished: 30 s for a long one.
            # shellcheck disable=SC2086  # several arguments
            part model 500 "$python" -m benchmarks model --preset "$preset" --deadline 420 \
                --out "$out/model.json" ${ARGS:-}
            figures model
            ;;
        *)
            lines+=("FAILED  no part is called '$name': tests, benchmark, model")
            failed=1
            ;;
    esac
done

# Last what a reader wants first.
{
    grep -hE '^(FAILED|ERROR) ' "$out"/tests-*.log 2>/dev/null | cut -c 1-160 | head -n 30
    grep -hE '^=+ .*(passed|failed|error|skipped|no tests ran).* =+$|^[0-9]+ (passed|failed|skipped|error)' \
        "$out"/tests-*.log 2>/dev/null
    [ -f "$out/operator.json" ] && "$python" -m benchmarks table "$out/operator.json" --brief
    [ -f "$out/model.json" ] && "$python" -m benchmarks table "$out/model.json"
    printf '%s\n' "${lines[@]}"
} | tee "$out/summary.txt"
exit "$failed"
