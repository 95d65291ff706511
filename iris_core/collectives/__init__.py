"""Collectives that the host starts, built on the device API."""
