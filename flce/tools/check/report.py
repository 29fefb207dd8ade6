"""What came of checks, as text to paste into a bug report and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flce.tools.check.figures import Figure
from flce.tools.check.run import CheckReport, CheckResult

MOST = 20  # of the wrong checks in a bug report


def bug_report(report: CheckReport, machine: Sequence[str], command: str) -> str:
    """Within a fence. `machine`: lines that describe it; `command`: what was run."""
    wrong = report.wrong
    lines = [f"$ {command}", *machine, report.verdict, *(line for result in wrong[:MOST] for line in _of(result))]
    if len(wrong) > MOST:
        lines.append(f"and {len(wrong) - MOST} further checks, which --json lists")
    lines += [f"not checked: {missing.what}: {missing.why}" for missing in report.missing]
    return "\n".join(["```", *lines, "```"])


def as_json(report: CheckReport, environment: dict[str, Any], command: str) -> dict[str, Any]:
    """``right`` and ``verdict`` first, then all that they are made of."""
    return {
        "right": report.right,
        "verdict": report.verdict,
        "command": command,
        "environment": environment,
        "checks": [
            {**asdict(result), "figures": [_figure(figure) for figure in result.figures]} for result in report.results
        ],
        "not_checked": [asdict(missing) for missing in report.missing],
        "no_time_for": report.late,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    """JSON has no NaN and no infinities: these become text."""
    values = {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
        for name, value in asdict(figure).items()
    }
    return {**values, "off": figure.off}


def _of(result: CheckResult) -> list[str]:
    lines = [f"{result.status}: {result.name}", *(f"  {sentence}" for sentence in result.wrong)]
    return [*lines, f"  {result.plan}"] if result.plan else lines
