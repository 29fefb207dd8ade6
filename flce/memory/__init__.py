"""Allocated memory over a stretch of a program: `profile` records it, `plot` draws it."""
