"""`optpipe demo`: the whole system, small: a service, a training beside it that adopts better schedules, the measured
gain, and a larger gain on stages that sleep."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.errors import OptPipeError
from optpipe_cli.compare import whether_it_fits
from optpipe_cli.fidelity import difference
from optpipe_cli.gain import Gain, gain_of, rounds
from optpipe_cli.launch import torchrun
from optpipe_cli.options import with_options
from optpipe_cli.output import echo, print_figures, require_writable

if TYPE_CHECKING:
    from optpipe.options import SolveOptions
    from optpipe_runtime.demo.train import DemoResult, DemoSettings, Step

TOLERANCE = 1e-5  # relative, of a step's loss against the plain run's


@with_options("SolveOptions", only=("time_limit_s",), time_limit_s=15.0)
def demo(
    options: SolveOptions,
    html: Annotated[Path, typer.Option(help="Where the page with both schedules is written.")] = Path(
        "optpipe-demo.html"
    ),
    packed: Annotated[
        bool, typer.Option("--packed", help="Show packed documents of different lengths, without a service.")
    ] = False,
) -> None:
    """Train a small GPT under torchrun, solve beside it, swap better schedules in, and show the gain."""
    from optpipe_cli import demo_paced, demo_packed, demo_page
    from optpipe_cli.extras import need

    need("runtime")
    require_writable(html)
    if packed:
        sound = demo_packed.run(html, TOLERANCE)
        echo(f"both schedules of one step, on stages that sleep: {html.resolve()}")
        raise typer.Exit(0 if sound else 1)
    need("server")
    from optpipe_runtime.demo.gpt import Size
    from optpipe_runtime.demo.on_ranks import load
    from optpipe_runtime.demo.train import DemoResult, DemoSettings

    settings = DemoSettings(
        microbatches=8,
        budget=1.35,  # of two that 1F1B needs: it fits only if it recomputes
        chunks=1,
        start="1f1b-recompute",
        options=dict(options.arguments()),
        block=3,
        rounds=6,
        most_live_steps=40,
        size=Size(sequences=2),
    )
    with tempfile.TemporaryDirectory(prefix="optpipe-demo-") as folder:
        outcome = run(settings, Path(folder))
        told = load(DemoResult, Path(folder) / "told.json")
    paced_html = html.with_stem(f"{html.stem}-paced")
    paced = demo_paced.run(paced_html)
    before, after = (told.schedules[version]["file"] for version in (0, _best(told)))
    demo_page.save(html, before, after, (TITLE, COLUMNS, rows(told)), told.steps)
    echo()
    echo(f"both schedules on one time scale, memory, table and losses: {html.resolve()}")
    if paced:
        echo(f"those of the stages that sleep: {paced_html.resolve()}")
    if not outcome.sound:
        raise typer.Exit(1)


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


def run(plan: DemoSettings, folder: Path) -> Outcome:
    """Run the demo in `folder` and print its table."""
    from optpipe.model.problem import Problem
    from optpipe_runtime.demo import reference
    from optpipe_runtime.demo.on_ranks import load, save
    from optpipe_runtime.demo.train import DemoResult

    ranks = max(2, min(4, os.cpu_count() or 1))
    save(plan, folder / "plan.json")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPTPIPE_CACHE": str(folder / "cache.db"),
        "OPTPIPE_KEY": "",  # the demo's own service needs none
    }
    with _service(folder, environment) as (url, pid):
        echo(f"service: {url}, process {pid}")
        echo(f"training: {ranks} ranks, {plan.microbatches} micro-batches")
        files = (folder / "plan.json", url, folder / "told.json")
        torchrun(ranks, "optpipe_runtime.demo.train", *files, environment=environment)
        adopted = _adopted(url)
    told = load(DemoResult, folder / "told.json")
    problem = Problem.from_dict(told.problem)
    method, name = ("interleaved", "interleaved 1F1B") if plan.chunks > 1 else ("1f1b", "1F1B")
    echo(whether_it_fits(problem, method, name))
    steps = len(told.steps)
    echo(f"the same {steps} steps in one plain process, to compare the losses")
    plain = reference.losses(plan.size, len(told.problem["stages"]), plan.microbatches, steps)
    print_figures(TITLE, COLUMNS, rows(told))
    for line in adopted:
        echo(line)
    limits = _limits(told)
    peaks = [peaks for step in told.steps for peaks in zip(step.peak_bytes, limits, strict=True)]
    best = _best(told)
    outcome = Outcome(
        loss_difference=difference([step.loss for step in told.steps], plain),
        within_memory=all(peak <= limit for peak, limit in peaks),
        gain=gain_of(rounds(told, best, plan.rounds)),
        found_in_cache=_look_up(told, plan, folder),
    )
    _print_verdict(outcome, ranks, 1 - told.schedules[best]["predicted_ms"] / told.schedules[0]["predicted_ms"])
    return outcome


@contextlib.contextmanager
def _service(folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Start the service as a process of its own, with a SQLite database, on a free port. Ended after the block."""
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
            for logged in (folder / "service.log").read_text(errors="replace").splitlines():
                echo(logged, err=True)
            raise OptPipeError("the service did not start; its log is above")
        try:
            yield line.removeprefix("listening on ").strip(), process.pid
        finally:
            process.terminate()


def _adopted(url: str) -> list[str]:
    """What the service knows of the adopted schedules, beside its predictions; nothing if the service is down."""
    import httpx

    lines = []
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        for job in http.get("/v1/jobs").raise_for_status().json()["jobs"]:
            for told in http.get(f"{job['url']}/adoptions").raise_for_status().json()["adoptions"]:
                measured = told["measured_iteration_ms"]
                took = "not measured" if measured is None else f"measured {measured:.0f} ms"
                says = f"predicted {told['predicted_ms']:.0f} ms, {took}"
                lines.append(f"adoption: schedule {told['seq']} runs since step {told['step']}, {says}")
    return lines


def _best(told: DemoResult) -> int:
    return min(range(len(told.schedules)), key=lambda version: told.schedules[version]["predicted_ms"])


def _middle(told: DemoResult, version: int) -> tuple[float, float]:
    """Median and interquartile range of a schedule's settled steps while the machine was quiet, in ms."""
    return _spread([step for step in told.steps if step.version == version and step.settled and not step.live])


def _spread(steps: list[Step]) -> tuple[float, float]:
    values = [step.ms for step in steps]
    if len(values) < 2:
        return (values[0] if values else float("nan")), float("nan")
    low, _, high = quantiles(values, n=4)
    return median(values), high - low


COLUMNS: tuple[str, ...] = ("schedule", "predicted", "measured", "beside the solver", "steps")
COLUMNS += ("peak predicted", "measured", "allowed", "loss")
TITLE = "times in ms: median ± interquartile range; peaks in MB, one figure a rank"


def rows(told: DemoResult) -> list[list[str]]:
    """Return a row of texts for each schedule that ran, for `COLUMNS`."""
    return [_row(told, version) for version in range(len(told.schedules))]


def _row(told: DemoResult, version: int) -> list[str]:
    schedule, limits = told.schedules[version], _limits(told)
    steps = [step for step in told.steps if step.version == version]
    peaks = [max(step.peak_bytes[d] for step in steps) for d in range(len(limits))]
    return [
        schedule["method"],
        f"{schedule['predicted_ms']:.0f}",
        _figure(_middle(told, version)),
        _figure(_spread([step for step in steps if step.live and step.settled])),
        str(len(steps)),
        _megabytes(schedule["predicted_peak_bytes"]),
        _megabytes(peaks),
        _megabytes(limits),
        f"{steps[0].loss:.3f} → {steps[-1].loss:.3f}",
    ]


def _limits(told: DemoResult) -> list[int]:
    return [device["activation_budget_bytes"] for device in told.problem["devices"]]


def _megabytes(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / 1e6:.1f}" for size in sizes)


def _figure(middle: tuple[float, float]) -> str:
    return f"{middle[0]:.0f} ± {middle[1]:.0f}" if middle[1] == middle[1] else "–"


def _look_up(told: DemoResult, plan: DemoSettings, folder: Path) -> bool:
    """Look the same problem up again."""
    from optpipe.model.problem import Problem
    from optpipe_cache import user_cache

    hit = user_cache(folder / "cache.db").lookup(
        Problem.from_dict(told.problem), plan.options.get("objective", "makespan")
    )
    echo(f"the same problem in the cache: {f'found, by {hit.schedule.method}' if hit else 'not found'}")
    return hit is not None


def _print_verdict(outcome: Outcome, ranks: int, predicted: float) -> None:
    gain, cores = outcome.gain, os.cpu_count() or 1
    sure = "a gain" if gain.low > 0 else "no gain beyond chance"
    within = f"95% of resamples between {gain.low:.1%} and {gain.high:.1%}"
    echo(
        f"losses: relative difference to the plain run at most {outcome.loss_difference:.1e} (tolerance {TOLERANCE:g})"
        "\n"
        f"memory: measured peaks {'within' if outcome.within_memory else 'ABOVE'} the limit in every step\n"
        f"time: with the best schedule a step takes {gain.median:.1%} less in alternation, {within}: {sure}\n"
        f"predicted: {predicted:.1%} less"
    )
    if ranks > cores:
        echo(f"note: {ranks} ranks share {cores} cores, which hides part of the gain")
