"""Solved schedules, found again by the features of their problems (OptPipe, section 4.2).

cache = Cache(default_path())
cache.add(schedule, "optimal", lower_bound_ms=258.0)
hit = cache.lookup(problem)  # for the same problem, or for the most similar one whose schedule is valid; or None
"""

from __future__ import annotations

from optpipe_cache.cache import Cache, Entry, Hit, default_path
from optpipe_cache.features import distance, features, structure
from optpipe_cache.storage import Storage, StoredRow

__all__ = ["Cache", "Entry", "Hit", "Storage", "StoredRow", "default_path", "distance", "features", "structure"]
