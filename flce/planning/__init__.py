"""The choice of a schedule: plans, their costs, and the search. `flce.plan` and `flce/ops/` call it."""
