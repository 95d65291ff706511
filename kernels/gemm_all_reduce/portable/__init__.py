"""Patterns over the portable main loop."""
