"""What the links and the synchronisation do by themselves: ``iris-bench links``."""
