"""Processes that live for weeks keep their modules out of the garbage collector's sight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = """
import gc, os, optpipe_server
def ready(url):
    print(gc.get_freeze_count(), flush=True)
    os._exit(0)
settings = optpipe_server.Settings("sqlite:///jobs.sqlite", processes=1, solves=0)
optpipe_server.serve(settings, port=0, ready=ready)
"""
POOL = """
import gc, optpipe_server.pool.warm
print(gc.get_freeze_count())
"""


@pytest.mark.parametrize("code", [SERVICE, POOL], ids=["the service", "its pool"])
def test_the_heap_is_frozen_when_the_process_answers(code: str, tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(told.stdout) > 50_000, "objects, most of them of modules"
