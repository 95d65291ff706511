"""The call log: what each rank's host has called, in shared host memory. Calls are compared; no rank is waited for.

| words of a rank | meaning |
|---|---|
| count | calls noted |
| CALLS pairs | of its last calls: what was called, as a digest, and with what number |

Each rank compares the calls of a peer with its own once both are there, so of two ranks that differ the later one finds
out. Calls that lie further back than both have kept are not compared.
"""

from __future__ import annotations

from typing import NamedTuple

from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.shared_memory import share_words

CALLS = 512
_RANK_WORDS = 1 + 2 * CALLS
_MARGIN = 8  # the oldest calls kept, which a peer may be writing over


class Difference(NamedTuple):
    """A call in which a peer did otherwise.

    Args:
        peer: the rank.
        call: the number of the call, from 1 on, since the context was opened or last reset.
        own, others: digest and number, of this rank's and the peer's.
    """

    peer: int
    call: int
    own: tuple[int, int]
    others: tuple[int, int]


class CallLog:
    """All ranks' last calls; making one is collective.

    Args:
        control_plane: all ranks.
    """

    def __init__(self, control_plane: ControlPlane) -> None:
        self._rank = control_plane.rank
        self._peers = [rank for rank in range(control_plane.world_size) if rank != self._rank]
        self._words = share_words(control_plane, control_plane.world_size * _RANK_WORDS, "iris_calls")
        self._compared = dict.fromkeys(self._peers, 0)  # calls that are

    def note(self, digest: int, number: int) -> Difference | None:
        """Note this rank's next call; return one in which a peer did otherwise, this or an earlier one, or None."""
        words, start = self._words, self._rank * _RANK_WORDS
        count = words[start]
        place = start + 1 + 2 * (count % CALLS)
        words[place], words[place + 1] = digest, number
        words[start] = count = count + 1
        for peer in self._peers:
            theirs = words[peer * _RANK_WORDS]
            if (count if count < theirs else theirs) > self._compared[peer]:
                if difference := self._compare(peer, count, theirs):
                    return difference
        return None

    def _compare(self, peer: int, count: int, theirs: int) -> Difference | None:
        """Return the first of the calls that both have noted, and were not compared, in which a peer did otherwise."""
        first = max(self._compared[peer], max(count, theirs) - CALLS + _MARGIN)
        self._compared[peer] = last = min(count, theirs)
        for call in range(first, last):
            own, others = self._call(self._rank, call), self._call(peer, call)
            if own != others:
                return Difference(peer, call + 1, own, others)
        return None

    def clear(self) -> None:
        """Forget this rank's calls; collective, with all ranks' calls forgotten before any notes another."""
        self._words[self._rank * _RANK_WORDS] = 0
        self._compared = dict.fromkeys(self._peers, 0)

    def _call(self, rank: int, call: int) -> tuple[int, int]:
        place = rank * _RANK_WORDS + 1 + 2 * (call % CALLS)
        return self._words[place], self._words[place + 1]
