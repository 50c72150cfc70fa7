"""Solved schedules, found again by the features of their problems (OptPipe, section 4.2).

cache = user_cache()  # the user's own file, and behind it the release's pack
cache.add(schedule, "optimal", lower_bound_ms=258.0)
hit = cache.lookup(problem)  # for the same problem, or for the most similar one whose schedule is valid; or None
"""

from __future__ import annotations

from optpipe_cache.cache import Cache, Entry, Hit, default_path, user_cache
from optpipe_cache.features import distance, features, structure
from optpipe_cache.storage import Pack, Retention, Source, Storage, StoredRow, release_pack

__all__ = [
    "Cache",
    "Entry",
    "Hit",
    "Pack",
    "Retention",
    "Source",
    "Storage",
    "StoredRow",
    "default_path",
    "distance",
    "features",
    "release_pack",
    "structure",
    "user_cache",
]
