"""How many threads a search gets."""

from __future__ import annotations

import threading


class ThreadBudget:
    """Shares threads among the searches that run at a time.

    A search that runs alone gets all threads but one for each free slot; every search gets at least one.
    """

    def __init__(self, total: int, slots: int) -> None:
        self._left, self._slots = total, slots
        self._lock = threading.Lock()

    def take(self, most: int | None = None) -> int:
        """Return the threads for one more search, which can use `most`."""
        with self._lock:
            self._slots -= 1
            taken = max(1, min(self._left - self._slots, self._left if most is None else most))
            self._left -= taken
            return taken

    def give_back(self, taken: int) -> None:
        with self._lock:
            self._slots += 1
            self._left += taken
