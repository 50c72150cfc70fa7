"""Start ranks: run a module by torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from optpipe.errors import InputError, OptPipeError


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
