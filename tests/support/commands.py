"""Commands of `optpipe` and other programs in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from optpipe_cli import main as cli


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


def program(
    name: str, main: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """A function that runs the program with the words that it is given."""

    def command(*words: object) -> Ended:
        monkeypatch.setattr("sys.argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder of its own, with a cache there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path / "cache.db"))
    return program("optpipe", cli.main, monkeypatch, capsys)
