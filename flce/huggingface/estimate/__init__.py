"""The memory of a training step: `rehearsal` runs the step without values, `training_memory` sums up the bytes."""
