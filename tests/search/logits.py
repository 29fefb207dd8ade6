"""Random calls of `flce.cross_entropy`, on logits in several memory layouts."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.logits import LAYOUTS
from tests.ops import test_cross_entropy
from tests.search import arguments
from tests.search.arguments import LOSS, Expected, defaults
from tests.search.driver import Call, Errors, Kind


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    call, most = arguments.draw_loss(rng, compiled, device)
    tokens = arguments.smaller(rng, compiled, arguments.size(compiled, max(1, min(most // call["vocab"], 2000))))
    batch = rng.randint(1, 3)
    shapes: list[tuple[int, ...]] = [(batch, -(-tokens // batch))] * 9
    leading = rng.choice([*shapes, (), (tokens,), (0, 3), (2, 1, 3)])
    layout = compiled.choice(list(LAYOUTS))
    return {
        **call,
        "leading": leading,
        "shift": min(call["shift"], *leading[-1:]) if leading else 0,
        "layout": layout,
        "inplace": compiled.random() < 0.5 and (LAYOUTS[layout][2] or len(leading) != 2),
        "grad": compiled.random() < 0.85,
        "weigh": compiled.random() < 0.5 and call["token_weight"],
    }


def check(call: Call, device: str, errors: Errors) -> None:
    p, stats = arguments.problem_of(call, device), call["stats"]
    upstream = arguments.upstream_of(call, p)
    how = {name: call[name] for name in ("inplace", "grad", "weigh")}
    with arguments.backend(call["backend"]):
        result = test_cross_entropy.run(p, call["layout"], stats=stats, grad_output=upstream, **how)
    # In place the gradient is rounded in forward, and multiplied in backward.
    once = arguments.arithmetic(call, p)
    subnormal = arguments.subnormal(call, p.input.dtype) * call["inplace"]
    expected = Expected(p, upstream, replace(once, roundings=1 + call["inplace"], subnormal=subnormal))
    prefix = f"logits {call['dtype']}"
    expected.compare_losses(errors, prefix, result.loss, result.output, stats)
    grads = {"x": result.grad_input, "t": result.grad_token_weight if call["weigh"] else None}
    expected.compare_gradients(errors, prefix, grads)


LOGITS = {"leading": (1, 3), "layout": "contiguous", "inplace": False, "grad": True, "weigh": False}
KIND = Kind("logits", {**defaults(**LOSS), **LOGITS}, draw, check)
