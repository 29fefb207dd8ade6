"""Dataclasses, checks and helpers that all other folders use. `core` imports none of them."""
