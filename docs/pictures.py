"""Draws the docs' pictures again: `make pictures`, or `python docs/pictures.py NAME...` for some systems.

The best published schedule of `optpipe try` and the solver's, at the same memory and on one time axis (NAME:
before-and-after); each published schedule on the problem of its paper's figure, so that the two can be laid side by
side; and the pictures of docs/concepts.md (NAME: concepts). By name only, since they need chromium: memory against
makespan for the README (NAME: curve) and at several budgets, which takes minutes (NAME: pareto), and the workbench of
the service's page (NAME: workbench).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

from playwright.sync_api import Page, sync_playwright

from optpipe import Problem, compare
from optpipe.model.placement import Shape, rechunk
from optpipe.show.svg import gantt
from optpipe_cli.compare import TIGHT
from optpipe_solver import heuristics, systems

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "problems"
BOTH, CONCEPTS, CURVE, PARETO, WORKBENCH = "before-and-after", "concepts", "curve", "pareto", "workbench"
ACTIVATION = 1000  # bytes of one stage's


def units(
    p: int,
    m: int,
    v: int = 1,
    shape: Shape = "looped",
    *,
    times: tuple[float, float, float] = (1, 1, 1),
    memory: int = 10**6,
    peers: bool = False,
    overlap_factor: float | None = None,
    **costs: Any,
) -> Problem:
    """p devices, v stages on each, m micro-batches; every stage takes `times` for F, B and W, messages nothing.
    `memory` in activations. `costs` are further fields of a device's stages together."""
    forward, backward, weight = (v * time for time in times)
    stage = {"forward_ms": forward, "backward_input_ms": backward, "backward_weight_ms": weight}
    stage |= {"activation_bytes": v * ACTIVATION, "saved_for_weight_bytes": v * ACTIVATION, **costs}
    device = {"activation_budget_bytes": memory * ACTIVATION}
    devices = [device | ({"peer": p - 1 - d} if peers else {}) for d in range(p)]
    content = {"microbatches": m, "devices": devices, "stages": [{"device": d, **stage} for d in range(p)]}
    return rechunk(
        Problem.from_dict(content | ({"overlap_factor": overlap_factor} if overlap_factor else {})), v, shape
    )


def leaving(ms: float, v: int = 1) -> dict[str, Any]:
    return {"offload_ms": v * ms, "reload_ms": v * ms, "offload_bytes": v * ACTIVATION}


def on_host(out: float, update: float, back: float, v: int) -> dict[str, Any]:
    return {"gradient_out_ms": v * out, "update_ms": v * update, "parameters_in_ms": v * back}


def again(ms: float, stays: int, v: int = 1) -> dict[str, Any]:
    return {"recompute_ms": v * ms, "checkpoint_bytes": stays}


SURVEY, V_SHAPES = "the survey's figure", "Qi et al. 2024, figure of the V schedules"

# By method: the problem of the paper's figure, and which figure that is.
FIGURES: dict[str, tuple[Problem, str]] = {
    "naive": (units(4, 1, times=(1, 0.5, 0.5)), SURVEY),
    "gpipe": (units(4, 8, times=(1, 0.5, 0.5)), SURVEY),
    "1f1b": (units(4, 8, times=(1, 0.5, 0.5)), SURVEY),
    "interleaved": (units(4, 8, 2), "Megatron-LM, figure 4"),
    "combined-1f1b": (units(4, 8, 2, overlap_factor=0.8), "no figure"),
    "interleaved-recompute": (units(4, 8, 2, **again(1, ACTIVATION // 5, 2)), "no figure"),
    "1f1b-recompute": (units(4, 8, **again(1, ACTIVATION // 5)), "no figure"),
    "zb-h1": (units(4, 8), "Qi et al. 2023, figure 3 (top)"),
    "zb-h2": (units(4, 8), "Qi et al. 2023, figure 3 (bottom)"),
    "zb-v": (units(4, 8, 2, "v"), V_SHAPES),
    "v-half": (units(4, 8, 2, "v"), V_SHAPES),
    "v-min": (units(4, 8, 2, "v"), V_SHAPES),
    "v-auto": (units(4, 8, 2, "v", memory=6), "no figure"),
    "dualpipe": (units(8, 20, shape="bidirectional", overlap_factor=1.0), "DeepSeek-V3, figure 5"),
    "dualpipe-v": (units(4, 10, 2, "v", overlap_factor=1.0), "DualPipeV"),
    "gis": (units(4, 8, 2), "PipeOffload, figure 5"),
    "gis-h": (units(4, 8, 2), "PipeOffload, figure 6"),
    "po-h": (units(4, 8, 2, **leaving(1.5, 2)), "PipeOffload, figure 7"),
    "po-f": (units(8, 16, **leaving(1.5)), "PipeOffload, figure 14"),
    "adaoffload": (Problem.load(EXAMPLES / "figure4-4x6.json"), "OptPipe, figure 4"),
    "algorithm-1": (Problem.load(EXAMPLES / "figure4-4x6.json"), "no figure"),
    "chronos": (units(4, 8, 2), "Lin et al., figure 5 (a)"),
    "chronos-recomp": (units(8, 8, 2, **again(1, 0, 2)), "Lin et al., figure 6 (b)"),
    "chronos-zero2": (units(4, 8, 2), "Lin et al., figure 7"),
    "chronos-offload": (units(4, 8, 2, **on_host(2, 4, 3, 2)), "Lin et al., figure 8"),
    "bpipe": (
        units(4, 8, peers=True, evict_ms=0.5, load_ms=0.5, evict_bytes=ACTIVATION),
        "BPipe, figure in “Solution”",
    ),
}


def figure(method: str) -> str:
    """The picture of a published schedule or a heuristic."""
    problem, source = FIGURES[method]
    schedule = systems.generate(method, problem) if method in systems.SYSTEMS else heuristics.generate(method, problem)
    return gantt(schedule, f"{method}, as in {source}" if source != "no figure" else method)


def before_and_after() -> None:
    found = compare(Problem.load(TIGHT), time_limit_s=30)
    assert found.best_published is not None
    for name, title, row in (
        ("before", "Before: interleaved 1F1B that recomputes", found.best_published),
        ("after", "After: OptPipe's schedule, same memory", found.best),
    ):
        assert row is not None
        assert row.schedule is not None
        write(f"{name}.svg", gantt(row.schedule, title, until_ms=found.best_published.makespan_ms))
        print(f"{name}: {row.makespan_ms:g} ms by {row.schedule.method}")


def concepts() -> Iterator[tuple[str, str]]:
    """The pictures of docs/concepts.md, all on one time axis, and their names."""
    ample, tight, leaves = units(4, 8, memory=4), units(4, 8, memory=2), units(4, 8, memory=2, **leaving(1))
    offloads = systems.generate("po-h", leaves)
    for name, title, schedule in (
        ("fused", "1F1B, memory for 4 activations", systems.generate("1f1b", ample)),
        ("split", "B and W apart, memory for 4 activations", systems.generate("zb-h1", ample)),
        ("tight", "B and W apart, memory for 2", heuristics.generate("adaoffload", tight)),
        ("offload", "Offloads, memory for 2", offloads),
        ("slower", "The same programs, ops of device 1 take half as long again", offloads.on(slower(leaves))),
    ):
        yield name, gantt(schedule, title, until_ms=42)


def slower(problem: Problem) -> Problem:
    """The problem with a device 1 whose ops last half as long again."""
    times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), 1.5)
    stages = [stage.model_copy(update=times) if stage.device == 1 else stage for stage in problem.stages]
    return problem.replace(stages=stages)


@contextmanager
def shown(url: str, drawn: str, width: int, height: int) -> Iterator[Page]:
    """A page in a browser without a window, once it has what `drawn` selects."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(url)
        page.wait_for_selector(drawn)
        yield page
        browser.close()


def memory_curve(name: str, *command: str | Path) -> None:
    """The picture of memory against makespan on the page that a command writes; what it prints, too."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        subprocess.run([sys.executable, "-m", *command, "--html", path], cwd=HERE.parent, check=True)
        with shown(path.as_uri(), "[data-drawn]", 1040, 640) as page:
            picture = page.evaluate("Plotly.toImage('picture', {format: 'svg', width: 1040, height: 560})")
    write(f"{name}.svg", unquote(picture.partition(",")[2]))


def workbench() -> None:
    """Take the picture of the service's workbench."""
    command = [sys.executable, "-m", "optpipe_cli", "serve", "--port", "0", "--solves", "0"]
    with TemporaryDirectory() as folder:
        command += ["--database", f"sqlite:///{folder}/jobs.sqlite"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
            try:
                assert service.stdout
                url = f"{service.stdout.readline().split()[-1]}/#/workbench?p=4&m=8&mem=75&k=0.6"
                with shown(url, "[data-drawn][data-method]", 1200, 1010) as page:
                    page.screenshot(path=HERE / "pictures" / "workbench.png", animations="disabled")
            finally:
                service.terminate()


def write(name: str, picture: str) -> None:
    path = HERE / "pictures" / name
    path.write_text(picture)
    print(path)


def main() -> None:
    names = sys.argv[1:] or [*FIGURES, BOTH, CONCEPTS]
    if unknown := [name for name in names if name not in (*FIGURES, BOTH, CONCEPTS, CURVE, PARETO, WORKBENCH)]:
        sys.exit(
            f"error: {unknown[0]} has no line in FIGURES of docs/pictures.py; those that have: {', '.join(FIGURES)}"
        )
    for name in names:
        if name == BOTH:
            before_and_after()
        elif name == PARETO:
            memory_curve(name, "benchmarks", "pareto", EXAMPLES / "fastlink-8x16.json", "--time-limit", "20")
        elif name == CURVE:
            memory_curve(name, "optpipe_cli", "try", "--curve")
        elif name == WORKBENCH:
            workbench()
        elif name == CONCEPTS:
            for concept, picture in concepts():
                write(f"concepts/{concept}.svg", picture)
        else:
            write(f"systems/{name}.svg", figure(name))


if __name__ == "__main__":
    main()
