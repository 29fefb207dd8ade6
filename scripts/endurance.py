"""Endurance on a GPU: many calls, threads, streams, interrupts, full memory, and allocators.

    python scripts/endurance.py --calls 10000

Prints one line for each check, and exits with 1 if one of them fails. Allocators are checked in new processes.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flce
from flce.testing.problem import make_problem, run_fused, run_oracle

MIB = 1 << 20
CALLS = 10_000
TOKENS = [1, 5, 16, 100, 128, 500, 777, 1024, 1500, 2000, 2048, 3000]
WARM_UP = 0.5  # share of the calls before which memory may grow
HOST_MIB, FRAGMENTATION_MIB = 5, 256


def random_call(rng: random.Random) -> Callable[[], Any]:
    """Return a call with one of 36 shapes and random options. Few combinations of options, because each compiles."""
    kinds: list[dict[str, Any]] = [
        {},
        {"softcap": 20.0, "bias": True},
        {"reduction": "none", "ignored": 0.3},
        {"z_loss": 1e-4, "token_weight": True},
        {"adapter_ranks": (8,), "label_smoothing": 0.1},
    ]
    tokens, vocab = rng.choice(TOKENS), rng.choice([1000, 32000, 50257])
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    budget: Any = rng.choice([None, "64MiB"])
    how: Any = {"dtype": dtype, "device": "cuda", "generator": torch.Generator("cuda").manual_seed(rng.randrange(1000))}
    problem = make_problem((tokens,), 256, vocab, **how, **rng.choice(kinds))
    options = flce.ChunkOptions(max_workspace_bytes=budget)
    return lambda: run_fused(problem, options=options, stats=rng.choice([(), ("lse", "entropy")]))


def host_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def many_calls(count: int) -> str:
    """Check that allocated memory is flat to the byte, and that host memory and fragmentation are bounded."""
    rng, after_warm_up = random.Random(0), None
    for number in range(count):
        call = random_call(rng)
        call()
        del call
        if number % 100 == 99:
            gc.collect()
            torch.cuda.synchronize()
            now = torch.cuda.memory_allocated(), host_bytes()
            if after_warm_up is None and number >= WARM_UP * count:
                after_warm_up = now
    assert after_warm_up is not None
    allocated, host = (b - a for a, b in zip(after_warm_up, now, strict=True))
    stats = torch.cuda.memory_stats()
    unused = stats["inactive_split_bytes.all.current"]
    assert allocated == 0, f"{allocated} bytes more are allocated"
    assert host <= HOST_MIB * MIB, f"the host has {host / MIB:.1f} MiB more"
    assert unused <= FRAGMENTATION_MIB * MIB, f"{unused / MIB:.0f} MiB are fragmented"
    return f"{count} calls, host {host / MIB:+.1f} MiB, {unused / MIB:.0f} MiB fragmented"


def expected_bits(seed: int = 0) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    p = make_problem((700,), 256, 5000, dtype=torch.bfloat16, device="cuda", seed=seed)

    def results() -> list[Tensor]:
        r = run_fused(p)
        assert r.grad_input is not None
        assert r.grad_weight is not None
        return [r.loss, r.grad_input, r.grad_weight]

    exact = run_oracle(p)
    first = results()
    assert float((first[0] - exact.loss).abs()) < 1e-4
    return results, first


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, got, expected)), "other bits"


def threads() -> str:
    """Check 8 threads: each call has the bits of a call alone."""
    made, wrong = [expected_bits(seed) for seed in range(8)], list[str]()

    def work(results: Callable[[], list[Tensor]], expected: list[Tensor]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    assert_same(results(), expected)
        except BaseException:
            wrong.append(traceback.format_exc())

    running = [threading.Thread(target=work, args=each) for each in made]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong, wrong[0]
    return "8 threads, 400 calls"


def streams() -> str:
    """Check calls on several streams, beside other work, and on a stream that is destroyed before its work ends."""
    results, expected = expected_bits()
    work = torch.randn(4096, 4096, device="cuda")
    found = []
    for number in range(20):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        work @ work  # beside the call
        with torch.cuda.stream(stream):
            found.append(results())
        torch.cuda.current_stream().wait_stream(stream)
        if number % 2:
            del stream
            gc.collect()
    torch.cuda.synchronize()
    for each in found:
        assert_same(each, expected)
    return "20 streams, 10 destroyed"


def interrupts() -> str:
    """Check an interrupt in the middle of forward and backward: nothing leaks, and the next call is right."""
    results, expected = expected_bits()
    results()
    torch.cuda.synchronize()
    before, caught = torch.cuda.memory_allocated(), 0
    for delay in range(1, 60):
        timer = threading.Timer(delay * 5e-5, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for _ in range(20):
                results()
            timer.join()
        except KeyboardInterrupt:
            caught += 1
        timer.cancel()
        gc.collect()
    assert_same(results(), expected)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before, f"{torch.cuda.memory_allocated() - before} bytes leaked"
    assert caught, "no call was interrupted"
    return f"{caught} interrupts"


def full_memory() -> str:
    """Check a call on a filled GPU: it continues with a smaller plan and names its budget, with which the next call
    needs no second attempt; nothing leaks."""
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(64000, (8192,), device="cuda")
    # The first calls load kernels, and cuBLAS allocates its own memory.
    for budget in ("1GiB", "64MiB"):
        flce.fused_linear_cross_entropy(x, w, y, options=flce.ChunkOptions(max_workspace_bytes=budget)).backward()
    x.grad = w.grad = None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    filler = torch.empty(max(0, free - x.nbytes - w.nbytes - 100 * MIB), dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()

    def budgets_named(options: flce.ChunkOptions) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flce.fused_linear_cross_entropy(x, w, y, options=options).backward()
        x.grad = w.grad = None
        gc.collect()
        assert torch.cuda.memory_allocated() == before, "memory leaked"
        return re.findall(r"max_workspace_bytes=(\d+)", " ".join(str(warning.message) for warning in caught))

    named = budgets_named(flce.ChunkOptions(strategy="tokens", chunk_rows=8192))
    assert named, "the GPU is not full, or no warning names a budget"
    again = budgets_named(flce.ChunkOptions(max_workspace_bytes=int(named[-1])))
    assert not again, f"the budget of {named[-1]} bytes does not fit"
    del filler
    return f"{len(named)} smaller plans; the budget of the last, {int(named[-1]) / MIB:.0f} MiB, fits"


ONE_CALL = """
import torch
from flce.testing.problem import make_problem, run_fused, run_oracle
p = make_problem((700,), 256, 5000, dtype=torch.bfloat16, device="cuda")
for _ in range(5):
    r = run_fused(p)
assert float((r.loss - run_oracle(p).loss).abs()) < 1e-4
print("right")
"""


def allocators() -> str:
    for setting in ("expandable_segments:True", "backend:cudaMallocAsync"):
        variables = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
        words = [sys.executable, "-c", ONE_CALL]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        assert done.stdout.strip().endswith("right"), done.stdout[-1000:] + done.stderr[-2000:]
    return "expandable_segments, cudaMallocAsync"


CHECKS: dict[str, Callable[..., str]] = {
    "calls": many_calls,
    "threads": threads,
    "streams": streams,
    "interrupts": interrupts,
    "full memory": full_memory,
    "allocators": allocators,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--only", choices=list(CHECKS), nargs="+", default=list(CHECKS))
    arguments = parser.parse_args()
    failed = 0
    for name, check in CHECKS.items():
        if name in arguments.only:
            try:
                print(f"{name}: {check(arguments.calls) if name == 'calls' else check()}", flush=True)
            except Exception:
                failed += 1
                print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
