"""Stands in for an engine: the environment variable that has the engine's name says what it does."""

import os
import signal
import subprocess
import sys
import time

from optpipe.process.protocol import (
    Bound,
    End,
    Incumbent,
    Note,
    Programs,
    Ready,
    Request,
    output,
    requests,
    write_frame,
)


def main() -> None:
    for request in requests(Request):
        behave(request)


def behave(request: Request) -> None:
    behaviour, _, figure = os.environ[request.method].partition(" ")
    write_frame(Ready())
    if behaviour == "crash":
        os._exit(7)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "garbage":
        output().write(b"no frame\n")
        output().flush()
    if behaviour == "slow":
        write_frame(Note(text="asleep"))
        time.sleep(600)
    if behaviour == "parent":  # of a process that knows nothing of anybody's standard input
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as own:
            write_frame(Note(text=str(own.pid)))
            time.sleep(60)
    if behaviour == "good":
        from optpipe_solver.heuristics import generate  # which others need not load

        write_frame(
            Incumbent(method="good engine", schedule=Programs.from_schedule(generate("adaoffload", request.problem)))
        )
        write_frame(Bound(method="good engine", lower_bound_ms=270.0))
    if behaviour == "invalid":
        write_frame(Incumbent(method="bad engine", schedule=Programs(programs=("0F0",) * len(request.problem.devices))))
        write_frame(
            Incumbent(method="bad engine", schedule=Programs(programs=("what?",) * len(request.problem.devices)))
        )
    if behaviour == "boastful":
        write_frame(Bound(method="boastful engine", lower_bound_ms=1e6))
    if behaviour == "tells":
        write_frame(
            Note(text=f"start {request.warm_start is not None}, threads {request.threads}, time {request.time_limit_s}")
        )
    if behaviour == "reports":
        write_frame(Note(text=f"{request.method}: as asked", method=request.method))
    if behaviour == "seed":
        write_frame(Note(text=f"{request.method} with seed {request.seed}"))
    if behaviour == "holds":
        held = bytearray(os.urandom(2**20) * int(figure))
        time.sleep(60)
        del held
    write_frame(End(spent_s=float(figure) if figure and behaviour != "holds" else None))


if __name__ == "__main__":
    main()
