"""Solved schedules, found again by what they are like (OptPipe section 4.2).

cache = Cache(default_path())
cache.add(schedule, "optimal", lower_bound_ms=258.0)
hit = cache.lookup(problem)  # of the same problem, or of the nearest one whose schedule fits; None where there is none
"""

from __future__ import annotations

from optpipe_cache.features import distance, features, shape
from optpipe_cache.shelf import Kept, Shelf
from optpipe_cache.store import Cache, Entry, Hit, default_path

__all__ = ["Cache", "Entry", "Hit", "Kept", "Shelf", "default_path", "distance", "features", "shape"]
