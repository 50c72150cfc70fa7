import pytest
from support.commands import Run, program

from benchmarks.__main__ import main


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`python -m benchmarks` with these words."""
    return program("benchmarks", main, monkeypatch, capsys)
