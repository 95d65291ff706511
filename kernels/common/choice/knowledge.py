"""What is known of a machine: its constants, and the times that were measured on it and on others of its chip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overlap_taxonomy import Machine, Work, machine_for

from .corrections import Corrections, Evidence, evidence_of, is_narrow, like
from .measured import Key, Table

SHIPPED = "measured"  # the word for times that come with the library


@dataclass
class Knowledge:
    """What is known of a machine.

    Args:
        gpu: the GPU's name.
        measured: times that its user measured.
        shipped: those that come with the library, of GPUs of this chip, by their names.
        calibrated: its constants, where they were measured here; for one number of ranks.
    """

    gpu: str
    measured: Table
    shipped: Mapping[str, Table]
    calibrated: Machine | None = None
    _evidence: list[Evidence] | None = field(default=None, repr=False)
    _corrections: dict[tuple[str, str, int, str, bool], Corrections] = field(default_factory=dict, repr=False)
    _rows: dict[Key, list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_evidence(cls, gpu: str, evidence: Sequence[Evidence], machine: Machine | None = None) -> Knowledge:
        """Return what these measured problems say of others, on a machine, and nothing of themselves."""
        return cls(gpu, {}, {}, machine, _evidence=list(evidence))

    @property
    def tables(self) -> dict[str, Table]:
        """The times of this GPU, by the word for where they are from, the first that counts first."""
        return {"measured here": self.measured, SHIPPED: self.shipped.get(self.gpu, {})}

    def machine(self, world_size: int) -> Machine | None:
        """Return the constants of so many of these GPUs; None where the model has none."""
        return self._machine_of(self.gpu, world_size)

    def _machine_of(self, gpu: str, world_size: int) -> Machine | None:
        if self.calibrated and (gpu, world_size) == (self.gpu, self.calibrated.world_size):
            return self.calibrated
        return machine_for(gpu, world_size)

    def measured_rows(self, key: Key) -> list[int]:
        """Return the numbers of rows with which a product was measured on this GPU; the key is of any of them."""
        if not self._rows:
            rows = defaultdict(list)
            for one in dict.fromkeys(key for table in self.tables.values() for key in table):
                rows[one._replace(m=1)].append(one.m)
            self._rows = dict(rows)
        return self._rows.get(key._replace(m=1), [])

    def evidence(self) -> list[Evidence]:
        """Return all problems that were measured on GPUs of this chip."""
        if self._evidence is None:
            here = {**self.shipped.get(self.gpu, {}), **self.measured}
            self._evidence = evidence_of({**self.shipped, self.gpu: here}, self._machine_of)
        return self._evidence

    def corrections(self, work: Work, baseline: str) -> Corrections:
        """Return what measured problems say of the predictions for one, beside a baseline."""
        key = (work.family, baseline, work.element_bytes, work.sums, is_narrow(work))
        if key not in self._corrections:
            self._corrections[key] = Corrections(self.gpu, baseline, like(self.evidence(), work))
        return self._corrections[key]
