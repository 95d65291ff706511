"""Bounded waits: the watchdog, the fault board that all ranks read, and recovery after a failure."""
