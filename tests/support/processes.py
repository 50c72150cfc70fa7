"""Which processes exist."""

import psutil


def over(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its exit code."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
