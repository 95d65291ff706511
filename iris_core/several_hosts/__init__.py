"""Ranks of several hosts: which rank lives where, and how those of one NVLink domain connect."""
