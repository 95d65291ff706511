"""The variant and configuration for a product of any number of rows, as data: rank 0 makes it, and all ranks have it.

A table is made with the first call of a product, from its ranking (ranking.py): what to take for the numbers of rows
that were measured, and for some others. A call of a number that is in neither takes the next one's, as tiles do; it
costs the host a microsecond, and no rank is asked.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from overlap_taxonomy import Choice

from .measured import to_config


@dataclass(frozen=True)
class Choices:
    """What to make of a product, by its number of rows.

    Args:
        rows: of the table, in ascending order; its last is the most that it is for.
        by_rows: what to make for each of them.
        measured: what to make for numbers of rows that were measured, which comes first.
    """

    rows: Sequence[int]
    by_rows: Sequence[Choice]
    measured: Mapping[int, Choice] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The most rows that the table is for."""
        return self.rows[-1]

    def of(self, m: int) -> Choice:
        """Return what to make for m rows, `most` at most."""
        return self.measured.get(m) or self.by_rows[bisect.bisect_left(self.rows, m)]

    def to_json(self) -> dict[str, Any]:
        """Return the table as what JSON holds."""
        return {
            "rows": list(self.rows),
            "by_rows": [_to_json(choice) for choice in self.by_rows],
            "measured": [[m, _to_json(choice)] for m, choice in self.measured.items()],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Choices:
        """Return the table that `to_json` gave."""
        measured = {m: _from_json(choice) for m, choice in found["measured"]}
        return cls(found["rows"], [_from_json(choice) for choice in found["by_rows"]], measured)


def _to_json(choice: Choice) -> list[Any]:
    return [choice.variant, asdict(choice.config) if choice.config else None, choice.why]


def _from_json(found: Sequence[Any]) -> Choice:
    variant, config, why = found
    return Choice(variant, to_config(config) if config else None, why)
