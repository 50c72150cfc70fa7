"""How many threads a search is given."""

from __future__ import annotations

import threading


class Threads:
    """A number of threads for so many places. Who is alone takes all but one for each other place; every place has at
    least one."""

    def __init__(self, total: int, places: int) -> None:
        self._left, self._places = total, places
        self._lock = threading.Lock()

    def take(self) -> int:
        """For one place, of those that are free."""
        with self._lock:
            self._places -= 1
            taken = max(1, self._left - self._places)
            self._left -= taken
            return taken

    def give_back(self, taken: int) -> None:
        with self._lock:
            self._places += 1
            self._left += taken
