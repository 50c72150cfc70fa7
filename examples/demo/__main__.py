"""`python -m examples.demo`: starts a service and the training, compares losses, and prints the gain."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import httpx
import torch

from examples import reference
from examples.demo.train import DemoResult, DemoSettings, Step, train
from examples.ranks import on_ranks
from optpipe import certify, plot, solve
from optpipe.errors import OptPipeError
from optpipe_cache import user_cache
from optpipe_cli.output import print_figures

TOLERANCE = 1e-5  # relative, of a step's loss against the plain run's
TITLE = "times in ms: median ± interquartile range; peaks in MB, one figure a rank"
COLUMNS = ("schedule", "predicted", "measured", "beside the solver", "steps", "peak predicted", "measured", "loss")


class Gain(NamedTuple):
    """How much shorter a step is with the best schedule, as a share: the median over rounds, and the range of 95 % of
    its resamples."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """What the demo found: the largest relative difference of a loss, memory, and the gain in time."""

    loss_difference: float
    within_memory: bool
    gain: Gain
    found_in_cache: bool

    @property
    def sound(self) -> bool:
        return self.loss_difference <= TOLERANCE and self.within_memory and self.found_in_cache


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Train a small GPT by a service.")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds of the search")
    parser.add_argument("--html", type=Path, default=Path("optpipe-demo.html"), help="page with both schedules")
    arguments = parser.parse_args()
    os.environ["OPTPIPE_KEY"] = ""  # the demo's own service needs none
    with tempfile.TemporaryDirectory(prefix="optpipe-demo-") as folder:
        result, outcome = run(DemoSettings(options={"time_limit_s": arguments.time_limit}), Path(folder))
    plot(result.schedules[result.best], result.schedules[0]).save(arguments.html)
    print(f"both schedules on one time scale, and their memory: {arguments.html.resolve()}")
    sys.exit(not outcome.sound)


def run(settings: DemoSettings, folder: Path) -> tuple[DemoResult, Outcome]:
    """Runs the demo with its files in `folder`, and prints its table."""
    ranks = max(2, min(4, os.cpu_count() or 1))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPTPIPE_CACHE": str(folder / "cache.db")}
    with service(folder, environment) as (url, pid):
        print(f"service: {url}, process {pid}")
        print(f"training: {ranks} ranks, {settings.microbatches} micro-batches")
        result = on_ranks(ranks, train, settings, url)
        adoptions = _adoptions(url)
    method = "interleaved" if settings.chunks > 1 else "1f1b"
    usual = solve(result.problem, method=method, time_limit_s=10.0)
    print(f"{method} fits" if usual.schedule else f"{method} does not fit: {usual.reason}")
    steps = len(result.steps)
    print(f"the same {steps} steps in one plain process, to compare the losses")
    torch.set_num_threads(1)  # as ranks have
    plain = reference.losses(settings.size, len(result.problem.stages), settings.microbatches, steps)
    print_figures(TITLE, COLUMNS, [_row(result, version) for version in range(len(result.schedules))])
    for line in adoptions:
        print(line)
    limits = [device.activation_budget_bytes for device in result.problem.devices]
    hit = user_cache(folder / "cache.db").lookup(result.problem, "makespan")
    print(f"the same problem in the cache: {f'found, by {hit.schedule.method}' if hit else 'not found'}")
    outcome = Outcome(
        reference.difference([step.loss for step in result.steps], plain),
        all(peak <= limit for step in result.steps for peak, limit in zip(step.peak_bytes, limits, strict=True)),
        gain_of(rounds(result.steps, result.best, settings.rounds)),
        hit is not None,
    )
    _print_verdict(outcome, result, ranks)
    return result, outcome


@contextlib.contextmanager
def service(folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Starts the service as a process of its own, with a SQLite database, on a free port. Ended after the block."""
    command = [sys.executable, "-m", "optpipe_cli", "serve", "--port", "0"]
    command += ["--database", f"sqlite:///{folder / 'optpipe.db'}"]
    with (
        (folder / "service.log").open("ab") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            process.kill()
            sys.stderr.write((folder / "service.log").read_text(errors="replace"))
            raise OptPipeError("the service did not start; its log is above")
        try:
            yield line.removeprefix("listening on ").strip(), process.pid
        finally:
            process.terminate()


def _adoptions(url: str) -> list[str]:
    """Which of its schedules the service knows to be adopted; nothing if it is down."""
    lines = []
    with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=url, trust_env=False) as http:
        for job in http.get("/v1/jobs").raise_for_status().json()["jobs"]:
            for adopted in http.get(f"{job['url']}/adoptions").raise_for_status().json()["adoptions"]:
                lines.append(f"adoption: schedule {adopted['seq']} of the service's, in step {adopted['step']}")
    return lines


def _row(result: DemoResult, version: int) -> list[str]:
    schedule = result.schedules[version]
    steps = [step for step in result.steps if step.version == version]
    settled = [step for step in steps if step.settled]
    return [
        f"{version + 1} {schedule.method}",
        f"{schedule.makespan_ms:.0f}",
        _spread([step.ms for step in settled if not step.live]),
        _spread([step.ms for step in settled if step.live]),
        str(len(steps)),
        _megabytes([peak.bytes for peak in certify(result.problem, schedule).device]),
        _megabytes([max(peaks) for peaks in zip(*(step.peak_bytes for step in steps), strict=True)]),
        f"{steps[0].loss:.3f} → {steps[-1].loss:.3f}",
    ]


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "–"
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.0f} ± {high - low:.0f}"


def _megabytes(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / 1e6:.1f}" for size in sizes)


def rounds(steps: Sequence[Step], best: int, count: int) -> list[float]:
    """The gain of each of the last `count` rounds, in which the first and the best schedule alternated."""
    settled = [step for step in steps if step.settled and not step.live and step.version in (0, best)]
    turns = [median(step.ms for step in turn) for _, turn in groupby(settled, key=lambda step: step.version)]
    turns = turns[-2 * count :]
    return [1 - after / before for before, after in zip(turns[::2], turns[1::2], strict=False)]


def gain_of(rounds: list[float]) -> Gain:
    """The gain with its spread by the bootstrap: medians of resampled rounds."""
    if not rounds:
        return Gain(0.0, 0.0, 0.0)
    draw = random.Random(0)
    drawn = sorted(median(draw.choices(rounds, k=len(rounds))) for _ in range(2000))
    return Gain(median(rounds), drawn[50], drawn[-51])


def _print_verdict(outcome: Outcome, result: DemoResult, ranks: int) -> None:
    gain, cores = outcome.gain, os.cpu_count() or 1
    predicted = 1 - result.schedules[result.best].makespan_ms / result.schedules[0].makespan_ms
    sure = "a gain" if gain.low > 0 else "no gain beyond chance"
    difference = f"relative difference to the plain run at most {outcome.loss_difference:.1e} (tolerance {TOLERANCE:g})"
    print(f"losses: {difference}")
    print(f"memory: measured peaks {'within' if outcome.within_memory else 'ABOVE'} the limit in every step")
    print(
        f"time: with the best schedule a step takes {gain.median:.1%} less in alternation, 95% of resamples between "
        f"{gain.low:.1%} and {gain.high:.1%}: {sure}; predicted {predicted:.1%} less"
    )
    if ranks > cores:
        print(f"note: {ranks} ranks share {cores} cores, which hides part of the gain")


if __name__ == "__main__":
    main()
