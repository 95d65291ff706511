"""Survivors that are known: what nothing here can notice, with the reason. `make mutants` fails for others."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {}
