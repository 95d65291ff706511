"""Patterns over the main loop for Hopper's GPUs."""
