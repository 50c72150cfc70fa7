"""Ranks: a module run by torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from optpipe.errors import OptPipeError


def torchrun(ranks: int, module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
    """Runs `module` on `ranks` ranks, one thread each, until all have ended; raises `OptPipeError` where one fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    variables = {**(environment or os.environ), "OMP_NUM_THREADS": "1"}
    if subprocess.run([*launch, *map(str, arguments)], env=variables, check=False).returncode != 0:
        raise OptPipeError(f"{module} failed under torchrun; what it said stands above")
