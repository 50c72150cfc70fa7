"""Scripts that torchrun starts elsewhere, on ranks that run already: they need not load torch again."""

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples.demo.train import DemoResult, DemoSettings, Training, train
from support.ranks.worker import Ranks

EXAMPLES = str(Path(__file__).parents[3] / "examples")
LIVE_S = 0.5  # before each step beside a search
TRAINING_S = 840.0  # of a whole training, on a busy machine


def run(text: str, folder: str, arguments: Sequence[str] = ()) -> str:
    """Runs a script, with `folder` for its files; returns what it prints."""
    said = io.StringIO()
    with _as_script(arguments) as patch, contextlib.redirect_stdout(said):
        patch.setattr(tempfile, "tempdir", folder)
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def calls_on(ranks: Ranks) -> Callable[..., Any]:
    """`examples.ranks.on_ranks` on these ranks, for the demo's training."""

    def on_ranks(count: int, run: Any, settings: DemoSettings, url: str) -> DemoResult:
        assert (count, run) == (ranks.world, train)
        result: DemoResult = ranks(train_on_slow_data, timeout=TRAINING_S, settings=settings, url=url)[0]
        return result

    return on_ranks


def train_on_slow_data(settings: DemoSettings, url: str) -> DemoResult:
    """The demo's training, beside a search that takes its time."""
    with slow_data():
        return train(settings, url)


@contextlib.contextmanager
def slow_data() -> Iterator[None]:
    """As if the demo's data came slowly while the search runs: training leaves the cores to it."""
    step = Training.step

    def slow(self: Training, trainer: Any, live: bool) -> None:
        if live:
            time.sleep(LIVE_S)
        step(self, trainer, live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", slow)
        yield


@contextlib.contextmanager
def _as_script(arguments: Sequence[str]) -> Iterator[pytest.MonkeyPatch]:
    """It believes to begin and to end its process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *arguments])
        patch.syspath_prepend(EXAMPLES)  # as for a script of that folder
        patch.setattr(dist, "init_process_group", lambda *_: None)
        patch.setattr(dist, "destroy_process_group", lambda *_: None)
        yield patch
