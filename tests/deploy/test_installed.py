"""What a user installs, from scratch and away from the sources: the wheel."""

import importlib.util
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from support.deployment import ROOT

from optpipe import Problem, ScheduleFile, __version__, check

SPEC = importlib.util.spec_from_file_location("dist", ROOT / "scripts" / "dist.py")
dist = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(dist)

PROBLEM = ROOT / "examples" / "problems" / "shared-pcie-4x8.json"
TORCH = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.timeout(1800)  # it installs torch
def test_the_wheel_alone_solves_serves_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OPTPIPE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path / "cache.sqlite"))
    monkeypatch.chdir(tmp_path)
    assert TORCH
    sdist, wheel = dist.build(tmp_path / "dist", tmp_path)
    dist.require_same("sdist", dist.files_of_sdist(sdist), dist.expected_in_sdist())
    dist.require_same("wheel", dist.files_of_wheel(wheel), dist.expected_in_wheel())
    python = dist.environment(tmp_path / "empty", f"{wheel}[runtime,server]", TORCH[0])
    optpipe = python.parent / "optpipe"

    def run(*words: object) -> str:
        return subprocess.run([*map(str, words)], check=True, text=True, stdout=subprocess.PIPE).stdout

    assert run(optpipe, "--version") == f"optpipe {__version__}\n"
    assert "less time than" in run(optpipe, "try", "--html", "try.html")
    assert "<html" in Path("try.html").read_text()
    run(optpipe, "solve", PROBLEM, "--time-limit", 10, "-o", "s.json")
    assert check(Problem.load(PROBLEM), ScheduleFile.load("s.json").schedule()) == []
    serve = [optpipe, "serve", "--port", "0", "--solves", "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout
        url = service.stdout.readline().split()[-1]
        with urllib.request.urlopen(url) as page:
            modules = re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', page.read().decode())
        assert modules
        for module in modules:
            with urllib.request.urlopen(f"{url}/{module.lstrip('/')}") as file:
                assert file.read()
        service.terminate()
    for name in ("train_gpt.py", "gpt.py", "text.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    ranks = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    lines = run(*ranks, "train_gpt.py", "--steps", 12).splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
