"""Start ranks: run a module by torchrun on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from optpipe.errors import InputError, OptPipeError

T = TypeVar("T")


def torchrun(
    ranks: int, module: str, *arguments: object, environment: Mapping[str, str] | None = None, quietly: bool = False
) -> None:
    """Run `module` on `ranks` ranks, one thread each, until all have ended.

    With `quietly` their stderr is held back; if a rank ends with a message as commands do, only that is shown. Raises
    `OptPipeError` if a rank fails.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    variables = {**(environment or os.environ), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *map(str, arguments)],
        env=variables,
        check=False,
        text=True,
        stderr=subprocess.PIPE if quietly else None,
    )
    if done.returncode != 0:
        errors = done.stderr or ""
        for sentence in (line.removeprefix("error: ") for line in errors.splitlines() if line.startswith("error: ")):
            raise InputError(sentence)
        sys.stderr.write(errors)
        raise OptPipeError(f"{module} failed under torchrun; its output is above")


def measured_on_ranks(ranks: int, module: str, *arguments: object) -> Any:
    """Run a module that writes its answer as JSON to the path behind its arguments, and return the answer.

    Raises `OptPipeError` if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="optpipe-ranks-") as folder:
        answer = Path(folder) / "answer.json"
        torchrun(ranks, module, *arguments, answer)
        return json.loads(answer.read_text())


def answered_on_ranks(kind: type[T], ranks: int, module: str, task: object) -> T:
    """Give a task to a module as `measured_on_ranks` does; return its answer, which is of this kind."""
    from pydantic import TypeAdapter

    from optpipe_runtime.demo.on_ranks import save

    with tempfile.TemporaryDirectory(prefix="optpipe-task-") as folder:
        asked = Path(folder) / "task.json"
        save(task, asked)
        return TypeAdapter(kind).validate_python(measured_on_ranks(ranks, module, asked))
