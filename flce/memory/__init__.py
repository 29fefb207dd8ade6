"""Memory profiles of a function: `profile` records the allocated bytes, `plot` draws them."""
