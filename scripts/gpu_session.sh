#!/usr/bin/env bash
# Tests and benchmarks that need a GPU, in calls of less than nine minutes.
#
#   scripts/gpu_session.sh             gpu-tests operator rows model-short; results in ./results, or in $OUT
#   scripts/gpu_session.sh PART...     only these parts:
#     gpu-tests    the tests that need a GPU; a minute or two
#     tests        all tests, on the GPU; seven minutes
#     older        the tests of kernels with the code and the launches of an A100 and of an RTX 4090, on a newer GPU
#     operator     targets of the operator; fails if a workspace differs from its plan; four minutes
#     rivals       the newest kernels of PyTorch, Liger and QuACK, and flce in their workspace; three minutes
#     calls        small calls and a large one: from an idle GPU, in a CUDA graph, and of the host; two minutes
#     exact        logits that are never rounded, rounded logits, torch.compile; without fused products; three minutes
#     curve        time over budget from 1 MiB on, and the peers, for three sizes; two minutes and a half
#     pages        for README.md and docs/performance.md, in one run: curve, training steps of two models in three
#                  settings, the picture of memory over a step; eight minutes, in a separate call
#     model-pages  of the part pages only the training steps; three minutes and a half
#     model-short  training steps of a whole model, 4 x 8192 tokens
#     model        training steps of whole models; in a separate call
#     rows         losses and softmaxes of rows in memory, over their length; about four minutes
#     logprobs     linear_logprobs, bare products, and kernels of TRL, Liger and verl; two minutes and a half
#     divergence   linear_divergence, bare products, and kernels of TRL and Liger; two minutes
#     sampled      gradients from sampled entries, on real heads (needs .cache/real-models) and on random ones, and their
#                  tests; six minutes
#     float32-head  linear_logprobs and its error beside a head in bfloat16, float32 and TF32; a minute
#     sampled-logprobs  linear_logprobs with sampled gradients on a real head, and errors; two minutes
#     sampled-training  five seeds of a small model, Gemma 3 270M and SmolLM2 135M with LoRA: stock, flce, and sampled
#                  gradients; four minutes
#     sampled-grpo  a GRPO training step of trained models, also with sampled gradients; two minutes
#     real-models  training steps of Gemma 3 270M and SmolLM2 135M, and of a model of 1B that is trained first, also with
#                  sampled gradients; three minutes
#     grpo         a GRPO step of a model, 8 x 4096 tokens: flce.huggingface.trl, TRL, Liger, all logits; two minutes
#     sanitize     the tests of kernels under compute-sanitizer, memcheck and racecheck, after memcheck has found a planted
#                  write; in a separate call
#     distributed  any number of GPUs: the tests of several processes, split-head, wrapped; eight minutes
#     split-head   a head that is divided over GPUs
#     wrapped      a model that is divided by FSDP2, TP, both, HSDP and ZeRO-3: stock, patched and with Liger's loss
#     several      split-head, wrapped, the recipes for FSDP2 and ZeRO-3; six minutes
#     small-card   the longest sequences that train on a simulated card of 24 GB; five minutes, in a separate call
#
# If a part fails, the next part still runs; the exit status is then 1. If time is short, the last parts are left out. In the environment:
#   PYTHON    the Python to use (python3), with torch, triton, pytest, typer and matplotlib; for models also transformers
#   WORKERS   processes of the tests (as many as cores and as 9 GiB of the GPU's memory, 16 at most)
#   PRESET    preset of the benchmarks: h200, or "tiny", which also runs without a GPU
#   ARGS      more arguments for model-short and model, such as "--set budgets_mib=512 --set optimizer=sgd"
#   WHEELS    folder with wheels of peers (.whl), installed for this run only
#   SECONDS_ALL       limit of all parts together (525)
#   SANITIZE_SECONDS  limit of the tests under compute-sanitizer (500)
#   SANITIZE_ONLY     regular expression on "tool, tests" that selects some of their groups
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

out=${OUT:-results}
python=${PYTHON:-python3}
preset=${PRESET:-h200}
wheels=${WHEELS:-.whl}
parts=${*:-gpu-tests operator rows model-short}
all=${SECONDS_ALL:-525}

mkdir -p "$out" || exit
unset TRITON_INTERPRET
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}"
failed=0
lines=()
logs=$(mktemp -d) || exit
trap 'rm -rf "$logs"' EXIT

fail() {
    lines+=("FAILED  $*")
    failed=1
}

# part NAME SECONDS COMMAND...: runs the command with its output in $out/NAME.log. After the seconds it is interrupted,
# so that it can still report.
part() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    [ "$limit" -ge 30 ] || { fail "$name: no time was left" && return; }
    echo "== $name: $*"
    timeout --signal=INT --kill-after=20 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    case $status in
        0) lines+=("ok      $name, $((SECONDS - start)) s") ;;
        124 | 137) fail "$name: stopped after its $limit s" ;;
        *) fail "$name: exit status $status, $((SECONDS - start)) s" ;;
    esac
}

# within SECONDS: the seconds, or the rest of $all if that is less.
within() {
    local left=$((all - SECONDS))
    echo $((left < $1 ? left : $1))
}

# benchmark NAME COMMAND PRESET SECONDS ARGUMENTS...: writes NAME.json. The deadline is $LATE seconds before the limit,
# because a call that has begun is finished, and libraries take time to start.
starter=()
benchmark() {
    local result=$1 command=$2 name=$3 limit
    limit=$(within "$4")
    [ "$preset" = tiny ] && name=tiny
    shift 4
    part "$result" "$limit" "$python" "${starter[@]}" -m benchmarks "$command" --preset "$name" \
        --deadline $((limit - ${LATE:-20})) --out "$out/$result.json" "$@"
}

# report NAME: writes tables, summary and picture of a result. In the background, because most of the time is the start of
# libraries.
reports=()
report() {
    local command=$1 result=$out/$1.json
    "$python" -m benchmarks table "$result" --out "$out/$command.md" &
    reports+=($!)
    "$python" -m benchmarks table "$result" --brief >"$logs/$command.summary" &
    reports+=($!)
    [ "$command" = curve ] || return
    "$python" -m benchmarks plot "$result" --out "$out/$command.png" &
    reports+=($!)
}

# linked NAME SECONDS: runs a benchmark with a process for each GPU, if there are several.
linked() {
    local starter=("${launch[@]:1}")
    [ "$processes" -gt 1 ] || return 0
    LATE=40 benchmark "$1-$processes" "$1" h200 "$2"
}

# Runs recipes with a process for each GPU, if there are several.
sharded_recipes() {
    local recipe
    [ "$processes" -gt 1 ] || return 0
    for recipe in accelerate_fsdp2 deepspeed_zero3; do
        if "$python" -c "import ${recipe%%_*}" >/dev/null 2>&1; then
            part "$recipe" "$(within 80)" "${launch[@]}" "integrations/$recipe.py" --steps 20
        else
            lines+=("left out $recipe: ${recipe%%_*} cannot be imported")
        fi
    done
}

# sanitize SECONDS: runs the tests of kernels in groups, each under each tool, AT_A_TIME at once (more take longer,
# because processes share a GPU by turns). Exit status 9 is an error of a tool, 124 a group without time.
AT_A_TIME=4
sanitize() {
    local limit=$1 begin=$SECONDS tool group job status count names=() outputs=()
    local groups=(
        "tests/backends/test_kernels.py -k 'not anywhere and not head and not many and not cuda'"
        "tests/backends/test_kernels.py -k '(anywhere or head or many) and not cuda'"
        "tests/backends/test_product.py -k 'not promise and not beside'" # these tests take a minute
        "tests/backends/test_exponentials.py -k 'operands or recomputed or offset'"
        "tests/backends/test_exponentials.py -k '(range or cancel or where_the or tiles or once_more) and not promise'"
        "tests/ops/test_extremes.py -k 'registers or exponentials'"
        "tests/ops/test_softmax.py -k 'launches or finite or slices or offsets'"
        "tests/ops/test_softmax.py -k 'test_columns and (266 or 269)'" # columns
    )
    [ "$limit" -ge 30 ] || { fail "sanitize: no time was left" && return; }
    planted_write || { fail "sanitize: a planted write outside of a tensor was not found" && return; }
    lines+=("ok      memcheck found a planted write outside of a tensor")
    for group in "${!groups[@]}"; do
        for tool in memcheck racecheck; do
            [[ "$tool, ${groups[group]}" =~ ${SANITIZE_ONLY:-} ]] || continue
            while [ "$(jobs -pr | wc -l)" -ge "$AT_A_TIME" ]; do wait -n; done
            outputs+=("$logs/$tool-$group.log")
            names+=("$tool, ${groups[group]}")
            sanitize_group "$tool" $((limit - SECONDS + begin)) "${groups[group]}" "${outputs[-1]}" &
        done
    done
    wait
    for job in "${!names[@]}"; do
        status=$(cat "${outputs[job]}.status")
        count=$(grep -oE '[0-9]+ passed' "${outputs[job]}" | tail -n 1)
        case $status in
            0) lines+=("ok      ${names[job]}: ${count:-nothing}") ;;
            vendor) lines+=("ok      ${names[job]}: ${count:-nothing}, races in the vendor's kernels only") && continue ;;
            124) fail "${names[job]}: ${count:-none} in time, then no time was left" ;;
            *) fail "${names[job]}: exit status $status" ;;
        esac
        grep -q 'SUMMARY: 0 ' "${outputs[job]}" || fail "${names[job]}: no summary of no errors"
    done
    tail -n 60 "${outputs[@]}" >"$out/sanitize.log"
}

# planted_write: true if memcheck finds a kernel that writes outside of its tensor.
planted_write() {
    cat >"$logs/planted.py" <<'PROGRAM'
import torch, triton, triton.language as tl
@triton.jit
def fill(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), 1.0)
fill[(1,)](torch.empty(1000, device="cuda"), 4096)
torch.cuda.synchronize()
PROGRAM
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 60 compute-sanitizer --tool memcheck --target-processes all \
        --error-exitcode 9 "$python" "$logs/planted.py" >"$logs/planted.log" 2>&1
    [ $? -eq 9 ] && grep -q 'Invalid __global__ write' "$logs/planted.log"
}

# has_only_vendor_races OUTPUT: true if racecheck reports no other error, and all tests passed.
has_only_vendor_races() {
    grep -q 'Race reported' "$1" && grep -qE '^[0-9]+ passed' "$1" &&
        ! grep -E '=+ .*Error|=  +and .*access at' "$1" | grep -qvE '(Race reported .*|and .*)access at nvjet'
}

# sanitize_group TOOL SECONDS TESTS OUTPUT
sanitize_group() {
    [ "$2" -ge 10 ] || { : >"$4" && echo 124 >"$4.status" && return; }
    # Without the caching allocator, because a read past a tensor would stay inside the allocator's block.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
        timeout --kill-after=20 $(($2 + 60)) \
        compute-sanitizer --tool "$1" --target-processes all --error-exitcode 9 \
        bash -c "exec timeout --signal=INT $2 '$python' -m pytest -q --tb=short -p no:cacheprovider $3" >"$4" 2>&1
    local status=$?
    # Racecheck reports races of the vendor's products (nvjet). It aborts if these kernels are excluded.
    if [ "$status" -eq 9 ] && has_only_vendor_races "$4"; then status=vendor; fi
    grep -q KeyboardInterrupt "$4" && [ "$status" != 9 ] && status=124
    echo "$status" >"$4.status"
}

if compgen -G "$wheels/*.whl" >/dev/null; then
    site=${TMPDIR:-/tmp}/site
    if "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl; then
        PYTHONPATH="$PYTHONPATH:$site"
    else
        fail "the wheels in $wheels could not be installed: no peers from there"
    fi
fi

question='import os, torch
cuda = torch.cuda.is_available()
memory = torch.cuda.get_device_properties(0).total_memory if cuda else os.cpu_count() * 9 << 30
most = max(1, min(16, os.cpu_count(), memory // (9 << 30)))
print(most, torch.cuda.device_count(), torch.cuda.get_device_name() if cuda else "")'
answer=$("$python" -c "$question") || exit
read -r most processes device <<<"$answer"
workers=${WORKERS:-$most}
if [ -z "$device" ] && [ "$preset" != tiny ]; then
    echo "There is no CUDA device here." >&2
    exit 2
fi
lines+=("device  ${device:-none}")
[ "$preset" = tiny ] && processes=2 # also on a CPU
launch=("$python" -m torch.distributed.run --nproc-per-node "$processes" --master-port 29511)
export NCCL_NVLS_ENABLE=0 # multicast over NVLink

for name in $parts; do
    case $name in
        gpu-tests | tests)
            select=() files=(tests)
            if [ "$name" = gpu-tests ]; then
                select=(-m gpu)
                # Only these files, because each process takes time to import the others.
                mapfile -t files < <(grep -rlE 'mark\.gpu' tests --include 'test_*.py' | grep -vE 'test_(first_call|older)')
            fi
            checks=tests/tools/test_check.py::test_on_a_gpu
            OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 part "$name" "$(within 400)" \
                "$python" -m pytest -q --tb=short --maxfail=30 --durations=8 -p no:cacheprovider -n "$workers" \
                --dist worksteal \
                "${select[@]}" --ignore tests/package/test_first_call.py --ignore tests/backends/test_older.py \
                --deselect "$checks" "${files[@]}"
            # These tests read the clock and the free memory, so they run alone. They run last, because on a new machine
            # Python first compiles the libraries, which takes half a minute.
            part tests-alone "$(within 200)" "$python" -m pytest -q --tb=short -p no:cacheprovider "${select[@]}" \
                tests/package/test_first_call.py "$checks"
            ;;
        older)
            part older "$(within 520)" "$python" -m pytest -q -rP --tb=short -p no:cacheprovider tests/backends/test_older.py
            ;;
        sanitize) sanitize "$(within "${SANITIZE_SECONDS:-500}")" ;;
        operator) benchmark operator operator targets 240 ;;
        calls) benchmark calls operator h200-small 145 ;;
        rivals) benchmark rivals operator h200-rivals 240 ;;
        curve) benchmark curve operator h200-curve 240 ;;
        pages)
            benchmark curve operator h200-curve 215
            benchmark model model h200-pages 225
            CUDA_LAUNCH_BLOCKING=1 part memory-h200 "$(within 60)" \
                "$python" -m benchmarks.memory "$out/memory-h200.png"
            ;;
        exact) benchmark exact operator h200-exact 240 ;;
        model-pages) benchmark model model h200-pages 225 ;;
        # shellcheck disable=SC2086  # several arguments
        model-short) benchmark model model h200-short 100 ${ARGS:-} ;;
        # shellcheck disable=SC2086
        model) benchmark model model h200 500 ${ARGS:-} ;;
        distributed)
            OMP_NUM_THREADS=1 part distributed-tests "$(within 330)" \
                "$python" -m pytest -q --tb=short --maxfail=12 --durations=8 -p no:cacheprovider tests/distributed
            linked split-head 120
            linked wrapped 170
            ;;
        split-head) linked split-head 120 ;;
        wrapped) linked wrapped 170 ;;
        several)
            linked split-head 120
            linked wrapped 170
            sharded_recipes
            ;;
        small-card)
            LATE=110 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True benchmark small-card small-card h200 400
            ;;
        rows) benchmark rows rows h200-rows 300 ;;
        logprobs) benchmark logprobs logprobs h200 150 ;;
        divergence) benchmark divergence divergence h200 130 ;;
        sampled)
            part sampled-tests "$(within 120)" "$python" -m pytest -q -p no:cacheprovider tests/ops/test_sampled_gradients.py
            benchmark sampled operator sampled 300
            ;;
        float32-head) benchmark float32-head logprobs float32-head 120 ;;
        sampled-logprobs)
            benchmark sampled-logprobs logprobs sampled 120
            part sampled-errors "$(within 60)" "$python" scripts/sampled_errors.py --out "$out/sampled-errors.txt"
            ;;
        sampled-training)
            part gemma3 "$(within 150)" "$python" scripts/fine_tune_alike.py gemma3 --out "$out/gemma3.json"
            part smollm2-lora "$(within 100)" \
                "$python" scripts/fine_tune_alike.py smollm2 --lora --out "$out/smollm2-lora.json"
            part seeds "$(within 150)" \
                "$python" scripts/train_alike.py --weights-and-data --steps 400 --out "$out/train-seeds.json"
            ;;
        sampled-grpo) benchmark sampled-grpo grpo sampled 150 ;;
        real-models) benchmark real-models model real-models 220 ;;
        grpo) benchmark grpo grpo h200 150 ;;
        *) fail "there is no part '$name': the top of this script lists all parts" ;;
    esac
done

measured=()
for name in model real-models grpo sampled-grpo rows logprobs divergence float32-head sampled sampled-logprobs calls rivals exact curve operator; do
    [ -f "$out/$name.json" ] || continue
    measured+=("$logs/$name.summary")
    report "$name"
done
for process in "${reports[@]}"; do wait "$process" || failed=1; done

# The summary is last, so that it is visible at the end of the output.
{
    grep -hE '^(FAILED|ERROR) ' "$out"/*tests.log 2>/dev/null | cut -c 1-160 | head -n 30
    grep -hE '^=+ .*(passed|failed|error|skipped|no tests ran).* =+$|^[0-9]+ (passed|failed|skipped|error)' \
        "$out"/*tests.log 2>/dev/null
    cat "${measured[@]}" /dev/null
    printf '%s\n' "${lines[@]}"
} | tee "$out/summary.txt"
exit "$failed"
