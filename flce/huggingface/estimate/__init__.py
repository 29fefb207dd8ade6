"""What a training step of a model will take: `rehearsal` runs it without values, `training_memory` adds up."""
