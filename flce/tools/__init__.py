"""The command line and what it runs: `flce check`, `flce plan`, `flce info`."""
