"""The Dockerfile's installation, from scratch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.deployment import DOCKERFILE, ROOT

WORKS = """
import importlib.util
import psycopg
from optpipe_cache.pack import PATH
from optpipe_server import create_app, serve
from optpipe_server.work.worker import work
assert importlib.util.find_spec("torch") is None
assert PATH.exists()
"""


@pytest.mark.soak
def test_the_image_s_packages_are_enough(tmp_path: Path) -> None:
    """An environment made by the Dockerfile's commands, from the build context's files, solves and has no torch."""
    for words in DOCKERFILE:
        if words[0] == "COPY" and not words[1].startswith("--"):
            for source in words[1:-1]:
                whole = ROOT / source
                if whole.is_dir():
                    shutil.copytree(
                        whole, tmp_path / "source" / source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                    )
                else:
                    (tmp_path / "source").mkdir(exist_ok=True)
                    shutil.copy(whole, tmp_path / "source" / source)
    environment = tmp_path / "opt"
    made, installed = [
        [word.replace("/opt/optpipe", str(environment)) for word in words[1:]]
        for words in DOCKERFILE
        if words[0] == "RUN"
    ]
    subprocess.run([sys.executable, *made[1:]], check=True)
    subprocess.run([word for word in installed if word != "--no-cache-dir"], cwd=tmp_path / "source", check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-I", "-c", WORKS], cwd="/", check=True)
    problem = ROOT / "examples" / "problems" / "shared-pcie-4x8.json"
    solved = subprocess.run(
        [environment / "bin" / "optpipe", "solve", str(problem), "--time-limit", "2", "--no-cache"],
        cwd=tmp_path,
        check=True,
        text=True,
        capture_output=True,
    )
    assert "ms by" in solved.stdout
