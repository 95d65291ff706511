"""Rows of measurements: written, read, printed, drawn."""
