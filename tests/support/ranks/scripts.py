"""Scripts that torchrun starts elsewhere, on ranks that run already: they need not load torch again."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module

import pytest
import torch.distributed as dist

from optpipe_runtime.demo.train import DemoResult, DemoSettings, Training, train
from support.ranks.worker import Ranks

LIVE_S = 0.5  # before each step beside a search
TRAINING_S = 840.0  # of a whole training, on a busy machine


def run(text: str, folder: str, arguments: Sequence[str] = ()) -> str:
    """Runs a script, with `folder` for its files; returns what it prints."""
    said = io.StringIO()
    with _as_script(arguments) as patch, contextlib.redirect_stdout(said):
        patch.setattr(tempfile, "tempdir", folder)
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def torchrun_on(ranks: Ranks) -> Callable[..., None]:
    """`optpipe_cli.launch.torchrun` on these ranks. Data come slowly: a search beside the training has the cores."""

    def torchrun(count: int, module: str, *arguments: object, environment: Mapping[str, str] = os.environ) -> None:
        assert count == ranks.world
        asked = {"module": module, "arguments": [*map(str, arguments)], "environment": dict(environment)}
        ranks(_main, timeout=TRAINING_S, **asked)

    return torchrun


def _main(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    with _as_script(arguments) as patch, slow_data():
        for name, value in environment.items():
            patch.setenv(name, value)
        import_module(module).main()


def train_on_slow_data(plan: DemoSettings, url: str) -> DemoResult:
    """The demo's training, beside a search that takes its time."""
    with slow_data():
        return train(plan, url)


@contextlib.contextmanager
def slow_data() -> Iterator[None]:
    """As if the demo's data came slowly while the search runs: training leaves the cores to it."""
    step = Training.step

    def slow(self: Training, live: bool) -> None:
        if live:
            time.sleep(LIVE_S)
        step(self, live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", slow)
        yield


@contextlib.contextmanager
def _as_script(arguments: Sequence[str]) -> Iterator[pytest.MonkeyPatch]:
    """It believes to begin and to end its process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *arguments])
        patch.setattr(dist, "init_process_group", lambda *_: None)
        patch.setattr(dist, "destroy_process_group", lambda *_: None)
        yield patch
