"""The command line and what it runs: `flce check`, `flce bench`, `flce demo`, `flce plan`, `flce info`."""
