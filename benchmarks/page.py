"""Time the interactive picture of a large schedule in a browser without a window: 64 devices, 512 micro-batches.

Needs chromium (`apt-get install chromium`) and the `dev` extra. The schedule is ZB-H1 on equal stages.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright

from benchmarks.problems import GB, pipeline, stage_costs
from optpipe.errors import InputError
from optpipe_solver import systems

DRAWN = "#picture[data-drawn]"


def page(
    devices: Annotated[int, typer.Argument(min=1)] = 64, microbatches: Annotated[int, typer.Argument(min=1)] = 512
) -> None:
    """Time the interactive picture of a large schedule in a browser: written, opened and drawn, zoomed."""
    path = chromium()
    stages = [stage_costs((1.0, 1.0, 1.0), GB)] * devices
    schedule = systems.generate("zb-h1", pipeline(stages, microbatches, 80 * GB, p2p_ms=0.1))
    ops = len(schedule.timeline.rows)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "picture.html"
        began = time.perf_counter()
        schedule.plot().save(file)
        print(f"{ops} ops; written in {time.perf_counter() - began:.2f} s, {file.stat().st_size / 1e6:.1f} MB")
        page = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]).new_page()
        measured = page.context.new_cdp_session(page)
        measured.send("Performance.enable", {"timeDomain": "threadTicks"})
        began = time.perf_counter()
        page.goto(file.as_uri())
        page.wait_for_selector(DRAWN)
        metrics = {each["name"]: each["value"] for each in measured.send("Performance.getMetrics")["metrics"]}
        took, computed = time.perf_counter() - began, metrics["TaskDuration"]
        print(f"opened and drawn in {took:.2f} s, in which the page computed for {computed:.2f} s")
        took = page.evaluate(
            """async () => {
              const plot = document.querySelector('.plot'), middle = plot.layout.xaxis.range[1] / 2;
              const began = performance.now();
              await Plotly.relayout(plot, {'xaxis.range[0]': middle, 'xaxis.range[1]': 1.02 * middle});
              while (plot.layout.images.length) await new Promise(requestAnimationFrame);
              return performance.now() - began;
            }"""
        )
        print(f"zoomed to a hundredth, op by op, in {took / 1000:.2f} s")


def chromium() -> str:
    """The path of a browser. Raises InputError if there is none."""
    path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if path is None:
        raise InputError("neither chromium nor google-chrome is installed, as by: apt-get install chromium")
    return path
