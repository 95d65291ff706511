"""Survivors that are known: what nothing here can notice, with the reason. `make mutants` fails for others."""

from __future__ import annotations

EXPLAINED = {
    "iris_core/device/sync.py::wait_each: sys -> gpu #3": "the scope is that of loads that acquire: none off NVIDIA",
}
