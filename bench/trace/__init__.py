"""Traces: what each program does when."""
