"""A loop that polls, told from one that works: it finds the same words as they were, again and again, and nothing new.

A program that polls must let others run, or what it waits for never comes; and it may wait for ever.
"""

from __future__ import annotations

from collections.abc import Hashable

POLLS = 20  # a word found as it was so often in a row: the program polls it
_MOST_WORDS = 4096  # remembered; a loop over more is none that polls


class Polling:
    """What one program has looked at since it last did, or saw, something new.

    Attributes:
        times: how often in a row it has found a word as it was; 0 after something new.
    """

    def __init__(self) -> None:
        self.times = 0
        self._looks: dict[Hashable, tuple[object, int, int]] = {}  # what was found, amid which news, how often
        self._news = 0

    def work(self) -> None:
        """Note that the program does something new: it stores, or loads data."""
        self._looks.clear()
        self._news += 1
        self.times = 0

    def saw(self, word: Hashable) -> bool:
        """Return whether it has looked at a word since it last did something new."""
        return word in self._looks

    def look(self, word: Hashable, found: object = None) -> int:
        """Note that the program looks at a word.

        Args:
            word: tells it from others.
            found: its value, or None if the caller notes changes with `work`.

        Returns:
            How often in a row it was found like this; 0 if it is new.
        """
        before, amid, times = self._looks.get(word, (self, 0, 0))
        if before != found:
            if len(self._looks) == _MOST_WORDS:
                self._looks.clear()
            self._news += 1
            self.times = 0
        else:
            self.times = times + 1 if amid == self._news else 1
        self._looks[word] = (found, self._news, self.times)
        return self.times
