"""Garbage collection in a process that answers requests for weeks."""

from __future__ import annotations

import gc


def settle() -> None:
    """Takes all that was made by now out of garbage collection; to be called once the process is ready.

    A full collection visits every object and stops every thread meanwhile. In a process that has imported a web
    framework or an array library that takes longer than a reply. It no longer visits what existed before this call.
    """
    gc.collect()
    gc.freeze()
