"""Commands of `optpipe` in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from optpipe_cli import main as cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder of its own, with a cache there; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path / "cache.db"))

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["optpipe", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return command
