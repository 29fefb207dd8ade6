"""Which schedule a call takes: the plan, the search for it, and what a schedule costs in memory and time."""
