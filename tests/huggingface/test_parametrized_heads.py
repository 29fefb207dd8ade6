"""Heads with a parametrised weight, and heads whose class other code changes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.huggingface.scripts import Compare


class Dropped(nn.Module):
    """A parametrisation with another result at each evaluation."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "dropout": lambda head: parametrize.register_parametrization(head, "weight", Dropped()),
    "doubled": lambda head: parametrize.register_parametrization(head, "weight", Doubled()),
}

SCRIPTS = {
    # Patching must not evaluate the parametrisation, and each forward must evaluate it once.
    **{
        f"patching evaluates nothing of {name}": f"""
        model = build("Llama")
        PARAMETRIZATIONS["{name}"](model.lm_head)
        state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        patch(model)
        torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), random)
        for _ in range(3):
            step()
            fused(1)"""
        for name in ("weight norm", "spectral norm", "dropout")
    },
    # In a transform the head runs stock code.
    # Copies share a class with the original. A change of one of them must not change this class.
    "copies": """
        original = build("Llama")
        PARAMETRIZATIONS["doubled"](original.lm_head)
        model = patch(copy.deepcopy(original))
        other = copy.deepcopy(model)
        assert not is_patched(original)
        step()
        if patched:
            parametrize.remove_parametrizations(unpatch(model).lm_head, "weight")
        model = other
        step()
        fused(2)""",
    # The function compares the exact class of a layer, so the model has to be unpatched first.
    **{
        f"removed, {unpatched=}, {order=}, {leave=}": f"""
        model = build("Llama")
        for change in {order}:
            if change == "add":
                PARAMETRIZATIONS["doubled"](model.lm_head)
            else:
                patch(model)
        step()
        fused(1)
        if "{unpatched}" == "before":
            unpatch(model)
            step()
            fused(0)
        parametrize.remove_parametrizations(model.lm_head, "weight", leave_parametrized={leave})
        step()
        fused({unpatched == "after"})
        unpatch(model)
        assert type(model.lm_head) is nn.Linear
        step()
        fused(0)
        patch(model)
        step()
        fused(1)"""
        for unpatched in ("before", "after")
        for order in (("add", "patch"), ("patch", "add"))
        for leave in (True, False)
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::flce.huggingface.NotFusedWarning")
def test_parametrised_heads(name: str, compare: Compare) -> None:
    compare(SCRIPTS[name])
