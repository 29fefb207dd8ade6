"""The command `flce`: `flce info`, `flce check` and `flce plan`."""
