"""The engine: runs the schedule of a plan on the tensors of a call. `flce/ops/` and `flce/planning/` call it."""
