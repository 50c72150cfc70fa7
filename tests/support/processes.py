"""Which processes exist, on Linux."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def over(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its exit code."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def started_with(text: str) -> list[int]:
    """Return the other processes that have the text in their environment."""
    return [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if pid != os.getpid() and text in _environment(pid)
    ]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it is over
        return ""
