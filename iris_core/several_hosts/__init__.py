"""Ranks of several hosts that reach each other's memory, in one NVLink domain: how they find each other."""
