"""Time the interactive picture of a large schedule in a browser without a window: 64 devices, 512 micro-batches.

    python scripts/time_page.py [DEVICES MICROBATCHES]

Needs chromium (`apt-get install chromium`) and the `dev` extra. The schedule is ZB-H1 on equal stages.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from optpipe import Problem
from optpipe_solver import systems

DRAWN = "#picture[data-drawn]"


def problem(devices: int, microbatches: int) -> Problem:
    """Equal stages, one a device."""
    stage = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0}
    stage |= {"activation_bytes": 10**9, "saved_for_weight_bytes": 10**9}
    return Problem.from_dict(
        {
            "microbatches": microbatches,
            "p2p_ms": 0.1,
            "devices": [{"activation_budget_bytes": 80 * 10**9}] * devices,
            "stages": [{"device": d, **stage} for d in range(devices)],
        }
    )


def main() -> None:
    devices, microbatches = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (64, 512)
    path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if path is None:
        sys.exit("error: neither chromium nor google-chrome is installed, as by: apt-get install chromium")
    schedule = systems.generate("zb-h1", problem(devices, microbatches))
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


if __name__ == "__main__":
    main()
