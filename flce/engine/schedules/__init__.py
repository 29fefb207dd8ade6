"""The schedules. `planning/search.py` chooses one of them."""
