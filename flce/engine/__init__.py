"""One call, run: its rows and memory, the tiles, and the schedules that walk them."""
