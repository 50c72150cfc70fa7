"""The heap of a process that answers requests for weeks."""

from __future__ import annotations

import gc


def settle() -> None:
    """Keeps all that was made by now, imported modules above all, until the process ends: to be called when it is
    ready.

    A full collection looks through every object and holds every thread up meanwhile, for longer than a reply takes in a
    process that has imported a web framework or an array library. Of what has settled it looks through nothing.
    """
    gc.collect()
    gc.freeze()
