"""Everything measured anew: the plan, and the command that runs it."""
