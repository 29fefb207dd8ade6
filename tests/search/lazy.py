"""Random programs on lazy logits. Their lines are drawn from the table in `tests.huggingface.operations`."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from tests.huggingface.fuzz import Run, Setup, assigned_names, compare, error_of, tensor_names
from tests.huggingface.operations import OPERATIONS
from tests.search.driver import Call, Errors, Kind, simpler_arguments

# How often each group is drawn.
WEIGHTS = {
    "views": 22,
    "copies": 12,
    "arithmetic": 14,
    "reductions": 7,
    "together": 8,
    "heads": 4,
    "models": 3,
    "writes": 18,
    "rare": 1,
    "reads": 6,
    "losses": 14,
    "divergences": 4,
    "autograd": 5,
}
# Programs of two models: their share, how often they draw the group of divergences, and their first line.
SHARE_OF_TWO, DIVERGENCES_OF_TWO = 0.25, 200
SECOND_LOGITS = ["b(ids)", "b(ids)", "b(ids).detach()", "b(ids).detach()", "b(ids.flip(0))", "a(ids)", "lg.detach()"]

BY_GROUP = {group: [each.code for each in OPERATIONS if each.group == group] for group in WEIGHTS}

NUMBERS = ["0.5", "2", "-1.5", "3.0", "0.25"]
MASKS = ["float('-inf')", "float('-inf')", "-1e4", "3.0", "0.0"]
# Parts of divergences.
LOGITS = ["{0}"] * 8 + ["{0}.detach()"] * 3
LOGITS += ["({0} / 2)", "({0} * -0.5)", "({0} / temperatures({0}))", "({0} / (2 * temperatures({0})))", "{0}.float()"]
LOGPROBS = ["{0}.log_softmax(-1)"] * 6 + ["{0}.log_softmax(-1).detach()"] * 2 + ["Categorical(None, {0}).logits"]
PROBABILITIES = ["{0}.softmax(-1)"] * 4 + ["{0}.softmax(-1).detach()"] * 2
PROBABILITIES += ["{0}.log_softmax(-1).exp()", "Categorical(None, {0}).probs"]
SLICES = ["1:", ":-1", "::2", "-1:", ":1", "1:2", ":0"]
FILLED = torch.tensor([float(n) for n in NUMBERS] + [-1e4, 3.0], dtype=torch.float64)
# Results that depend on rounding if the numbers have low precision.
DISCRETE = re.compile(r"arg|topk|max|min\(|sort|[<>] |==|equal|relu|clamp|> 0|floor|long\(|/ \{x")


class Unsuitable(Exception):
    """No value can be drawn for a placeholder."""


class Draw(dict[str, str]):
    """The values of an operation's placeholders, each drawn at its first read."""

    def __init__(self, rng: random.Random, tensors: dict[str, Any], fresh: Iterator[int]) -> None:
        self.rng, self.tensors, self.fresh = rng, tensors, fresh

    def __missing__(self, key: str) -> str:
        self[key] = drawn = DRAW_BY_KEY[key](self)
        return drawn

    def pick(self, suits: Callable[[Tensor], bool]) -> str:
        is_empty = self.rng.random() < 0.3  # whether it may be
        names = [
            name
            for name, x in self.tensors.items()
            if x.is_floating_point() and x.ndim and (x.numel() or is_empty) and suits(x)
        ]
        if not names:
            raise Unsuitable
        # Errors need chains: most lines use the result of the previous line, or the model's logits.
        return self.rng.choices([names[-1], names[0], self.rng.choice(names)], [40, 25, 35])[0]

    def new(self) -> str:
        if self.rng.random() < 0.12:
            return self.rng.choice([n for n in self.tensors if not n.startswith("loss")] or ["lg"])
        return f"t{next(self.fresh)}"

    def other(self) -> str:
        main = self.main()
        if self.rng.random() < 0.1:
            return next(name for name, x in self.tensors.items() if x is main)
        return self.pick(lambda x: x is not main and x.shape == main.shape)

    def part(self, templates: Sequence[str] = ("{0}",)) -> str:
        """Return a function of the logits, or of another tensor of their shape."""
        name = self["g"]
        with contextlib.suppress(Unsuitable):
            name = self.rng.choice([name, name, self["o"]])
        return self.rng.choice(templates).format(self.rng.choice(LOGITS).format(name))

    def below(self, size: int) -> str:
        if not size:
            raise Unsuitable
        return str(self.rng.randrange(size))

    def dimension(self) -> str:
        return str(self.rng.randrange(-self.main().ndim, self.main().ndim))

    def operands(self) -> list[Tensor]:
        return [self.tensors[self[key]] for key in "xglo" if key in self]

    def main(self) -> Tensor:
        """Return the tensor that the operation is applied to."""
        operands = self.operands()
        return operands[0] if operands else self.tensors[self["x"]]


# A function for each placeholder, which draws its value.
DRAW_BY_KEY: dict[str, Callable[[Draw], str]] = {
    "x": lambda draw: draw.pick(lambda x: x.numel() < 1500 and x.ndim < 6),
    "g": lambda draw: draw.pick(lambda x: x.ndim > 1 and x.shape[-1] > 1 and x.numel() < 1500),
    "l": lambda draw: draw.pick(lambda x: x.shape == (2, 4, 13)),
    "o": Draw.other,
    "y": Draw.new,
    "z": lambda draw: f"t{next(draw.fresh)}",
    "loss": lambda draw: f"loss{next(draw.fresh)}",
    "n": lambda draw: draw.rng.choice(NUMBERS),
    "inf": lambda draw: draw.rng.choice(MASKS),
    "d": Draw.dimension,
    "e": Draw.dimension,
    "i": lambda draw: draw.below(draw.main().shape[int(draw["d"])]),
    "i0": lambda draw: draw.below(draw.main().shape[0]),
    "c": lambda draw: draw.below(draw.main().shape[-1]),
    "p": lambda draw: ", ".join(map(str, draw.rng.sample(range(draw.main().ndim), draw.main().ndim))),
    "s": lambda draw: draw.rng.choice(SLICES),
    "part": Draw.part,
    "logp": lambda draw: draw.part(LOGPROBS),
    "logq": lambda draw: draw.part(LOGPROBS),
    "probs": lambda draw: draw.part(PROBABILITIES),
    "t": lambda draw: "torch." + draw.rng.choice(["float64", "float64", "float32", "bfloat16"]),
}


def draw_setup(rng: random.Random) -> Setup:
    bias = rng.random() < 0.5
    names = ["embedding.weight", "trunk", "head.weight"] + (["head.bias"] if bias else [])
    tied = rng.random() < 0.05
    dtype = rng.choices(["float64", "float32", "bfloat16"], [85, 12, 3])[0]
    return Setup(
        dtype=dtype,
        bias=bias,
        shape=rng.choices([(2, 4), (8,), (3, 1), (1, 5), (2, 2, 2), (0, 4), (0,)], [66, 10, 5, 10, 5, 3, 1])[0],
        max_workspace_bytes=rng.choice([None, 3000]),
        head=(13, 5) if tied else rng.choices([(13, 5), (5, 5), (13, 1), (5, 1), (1, 5)], [80, 8, 5, 4, 3])[0],
        frozen=rng.choice(names) if not tied and rng.random() < 0.15 else "",
        tied=tied,
        adapter=rng.random() < 0.2,
        autocast=dtype == "float32" and rng.random() < 0.4,
        mode=rng.choices(["train", "labels", "no_grad"], [85, 10, 5])[0],
    )


def has_ties(x: Any) -> bool:
    """Return True if rounding decides the order of two entries, or the sign of one."""
    numbers = x.detach().double().flatten()
    numbers = numbers[numbers.isfinite()].sort().values
    rounded = (numbers.diff().abs() < 1e-6) | (numbers[1:].abs() < 1e-6)
    return bool((rounded & ~torch.isin(numbers[1:], FILLED)).any())


def is_rounding(x: Tensor) -> bool:
    """Return True for a divergence of equal distributions, whose sign depends on rounding."""
    return bool(x.abs().max() < 0.02) if x.numel() else False


def is_differentiable(x: Tensor) -> bool:
    with contextlib.suppress(RuntimeError):  # autograd forbids reading some views
        return x.grad_fn is not None and (x.ndim > 0 or bool(x.isfinite()))
    return False


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    """Draw a program. Run each line on the stock model, so that the next line fits the tensors."""
    setup = draw_setup(rng)
    run = Run(setup, patched=False)
    steps: list[str] = []
    fresh = iter(range(1, 1000))
    length = rng.randint(2, 10)
    weights = dict(WEIGHTS)
    if rng.random() < SHARE_OF_TWO:
        weights["divergences"] = DIVERGENCES_OF_TWO
        steps.append(f"t0 = {rng.choice(SECOND_LOGITS)}")
        run.step(steps[0])
    for _ in range(4 * length):
        if len(steps) == length:
            break
        group = rng.choices([*weights], [*weights.values()])[0]
        template = rng.choice(BY_GROUP[group])
        if setup.dtype == "bfloat16" and DISCRETE.search(template):
            continue
        drawing = Draw(rng, run.tensors, fresh)
        try:
            step = template.format_map(drawing)
        except Unsuitable:
            continue
        if DISCRETE.search(template) and any(map(has_ties, drawing.operands())):
            continue
        if rng.random() < 0.05:
            step = f"with torch.no_grad(): {step}"
        elif group == "reads" and rng.random() < 0.1:
            step = f"with torch.inference_mode(): {step}"
        elif setup.dtype == "float32" and rng.random() < 0.3:
            step = f"with autocast(): {step}"
        error = error_of(lambda step=step: run.step(step))  # type: ignore[misc]
        if error is None:
            steps.append(step)
        elif rng.random() < 0.1:
            steps.append(step)
            break
        if group == "divergences" and error is None and is_rounding(run.tensors[assigned_names(step)[0]]):
            break
        if not all(isinstance(x, Tensor) for x in run.tensors.values()):
            raise TypeError(f"`{step}` has a result that is not a tensor")
    shares = {name: 0.9 if name.startswith("loss") else 0.35 for name in run.tensors}
    roots = [name for name, x in run.tensors.items() if rng.random() < shares[name] and is_differentiable(x)]
    return {**asdict(setup), "steps": tuple(steps), "roots": tuple(roots), "read_first": rng.random() < 0.5}


def simpler(call: Call, defaults: Mapping[str, Any]) -> Iterator[Call]:
    """Yield calls with fewer arguments, lines or names."""
    yield from simpler_arguments(call, defaults)
    steps, roots = call.get("steps", ()), call.get("roots", ())

    def names_of(lines: Sequence[str]) -> int:
        return len({name for line in lines for name in tensor_names(line)})

    for position, step in reversed(list(enumerate(steps))):
        before, after = steps[:position], steps[position + 1 :]
        new = assigned_names(step)
        others = [name for name in tensor_names(step) if name not in new] or ["lg"]
        for old in new:  # another tensor replaces the result of the line
            lines = tuple(re.sub(rf"\b{old}\b", others[0], line) for line in after)
            yield {
                **call,
                "steps": before + lines,
                "roots": tuple(dict.fromkeys(others[0] if r == old else r for r in roots)),
            }
        plainer = [re.sub(r"^with .*?: ", "", step)]
        plainer += [re.sub(rf"\b{name}\b(?! =)", "lg", step) for name in tensor_names(step) if name != "lg"]
        for line in plainer:
            if (names_of([*before, line, *after]), len(line)) < (names_of(steps), len(step)):
                yield {**call, "steps": (*before, line, *after)}


SETUP = [field.name for field in fields(Setup)]
DEFAULTS: Call = {**asdict(Setup()), "steps": (), "roots": (), "read_first": False, "layout": False}


def kind(run: type[Run] = Run) -> Kind:
    """Return the kind. `run`: the class that runs a program on the patched model."""

    def check(call: Call, device: str, errors: Errors) -> None:
        rest = {name: value for name, value in call.items() if name not in SETUP}
        compare(Setup(**{name: call[name] for name in SETUP}), **rest, run=run)

    return Kind("lazy", DEFAULTS, draw, check, simpler, share=4.0)


KIND = kind()
