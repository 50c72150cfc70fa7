"""Ranks: a module run by torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from optpipe.errors import InputError, OptPipeError


def torchrun(
    ranks: int, module: str, *arguments: object, environment: Mapping[str, str] | None = None, quietly: bool = False
) -> None:
    """Runs `module` on `ranks` ranks, one thread each, until all have ended; raises `OptPipeError` where one fails.
    `quietly`, where ranks end as commands do: what they write to stderr is kept back, and where one ends with a
    sentence, that is all that is said."""
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
        said = done.stderr or ""
        for sentence in (line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")):
            raise InputError(sentence)
        sys.stderr.write(said)
        raise OptPipeError(f"{module} failed under torchrun; what it said stands above")
