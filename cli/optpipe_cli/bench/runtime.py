"""`optpipe bench runtime`: predicted and measured times side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from optpipe_cli.launch import torchrun
from optpipe_cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe_runtime.bench.fidelity import Row, Task

T = TypeVar("T")

RANKS, COMPUTING_RANKS = 4, 2
MICROBATCHES, COMPUTING_MICROBATCHES = 8, 4


def runtime(
    steps: Annotated[int, typer.Option(help="Steps of each schedule that count.", min=2)] = 12,
    paced: Annotated[bool, typer.Option(help="Stages that take their time without computing, on four ranks.")] = True,
    computed: Annotated[bool, typer.Option(help="The demo's model on two ranks.")] = True,
    in_a_row: Annotated[
        bool, typer.Option(help="Steps in a row, with an optimizer step after each, on four ranks.")
    ] = True,
    host: Annotated[bool, typer.Option(help="What the executor and a swap cost the host.")] = True,
    json: Json = False,
) -> None:
    """Measure steps and memory of many schedules against predictions, steps in a row, and the host's overhead."""
    from optpipe_cli.extras import need

    need("runtime")
    content: dict[str, Any] = {}
    if paced:
        rows = run(paced_task(steps), RANKS)
        content["paced"] = show(rows, "stages that sleep, 4 ranks", None, json)
        if not json:
            typer.echo(f"a ms more on each message: {messages_in_a_row(rows)}")
    if computed:
        task = computing_task(steps)
        content["computed"] = show(run(task, COMPUTING_RANKS), "the demo's model, 2 ranks", _plain(task), json)
    if in_a_row:
        content["in_a_row"] = _in_a_row(json)
    if host:
        content["host"] = _host(json)
    if json:
        print_json(content)


def paced_task(steps: int) -> Task:
    """Return ten schedules of all placements; half of them offload."""
    from optpipe_runtime.bench.fidelity import Case, Task
    from optpipe_runtime.bench.paced import Times

    cases = [
        Case("1f1b"),
        Case("zb-h1"),
        Case("adaoffload", memory=2.5),
        Case("naive", memory=2.0),
        Case("interleaved", 2),
        Case("po-h", 2, memory=2.5),
        Case("po-f", 2, memory=2.5),
        Case("zb-v", 2, "v"),
        Case("v-min", 2, "v"),
        Case("lns", 2, "v", memory=1.5),
    ]
    return Task(cases, MICROBATCHES, steps, Times(20.0, 20.0, 16.0, 12.0))


def computing_task(steps: int) -> Task:
    """Return 1F1B and zero bubble with memory for all; PipeOffload and the solver with less than interleaved 1F1B
    needs."""
    from optpipe_runtime.bench.fidelity import Case, Task

    return Task(
        [Case("1f1b"), Case("zb-h1"), Case("po-f", 2, memory=1.8), Case("auto", 2, memory=1.8)],
        COMPUTING_MICROBATCHES,
        steps,
    )


def run(task: Task, ranks: int) -> list[Row]:
    """Start the ranks; return the cases for which a schedule was found."""
    from optpipe_runtime.bench.fidelity import load

    return _measured(ranks, "fidelity", load, task)


def _measured(ranks: int, bench: str, load: Callable[[Path], T], task: Task | None = None) -> T:
    """What a bench of the runtime says that runs on so many ranks."""
    with tempfile.TemporaryDirectory(prefix="optpipe-bench-") as folder:
        asked, found = [Path(folder) / "task.json"] * (task is not None), Path(folder) / "found.json"
        if task is not None:
            task.save(*asked)
        torchrun(ranks, f"optpipe_runtime.bench.{bench}", *asked, found)
        return load(found)


def _plain(task: Task) -> list[float]:
    """The losses of the same steps in one plain process."""
    from optpipe_runtime.bench.fidelity import WARM_UP
    from optpipe_runtime.demo import reference

    return reference.losses(task.size, COMPUTING_RANKS, task.microbatches, WARM_UP + task.steps)


def difference(losses: list[float], plain: list[float]) -> float:
    """Return the largest relative difference of a loss."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain, strict=True))


def show(rows: list[Row], title: str, plain: list[float] | None, quiet: bool) -> list[dict[str, Any]]:
    """Print the table unless it shall be quiet; return it as JSON takes it."""
    differences = [None if plain is None else difference(row.losses, plain) for row in rows]
    if not quiet:
        print_table(_table(rows, title, differences))
    figures = ({"measured_ms": row.measured_ms, "spread_ms": row.spread_ms, "deviation": row.deviation} for row in rows)
    return [
        {**asdict(row), **more, "loss_difference": loss}
        for row, more, loss in zip(rows, figures, differences, strict=True)
    ]


def messages_in_a_row(rows: list[Row]) -> str:
    """Return how much longer each schedule gets if each message takes a ms more."""
    return ", ".join(f"{row.found_by} {row.messages_in_a_row / row.predicted_ms:+.1%}" for row in rows)


COLUMNS = ("schedule", "stages", "predicted", "measured", "off by", "peak predicted", "measured", "losses off by")


def cells(row: Row, loss: float | None = None) -> list[str]:
    """Return a case as texts, for `COLUMNS`."""
    from optpipe.show.svg import bytes_text

    return [
        row.found_by,
        f"{row.case.chunks} a rank" + (f", {row.case.shape}" if row.case.chunks > 1 else ""),
        f"{row.predicted_ms:.1f}",
        f"{row.measured_ms:.1f} ± {row.spread_ms:.1f}",
        f"{row.deviation:+.1%}",
        bytes_text(max(row.predicted_peak)),
        bytes_text(max(row.measured_peak)),
        "" if loss is None else f"{loss:.1e}",
    ]


def _table(rows: list[Row], title: str, differences: list[float | None]) -> Table:
    from rich.table import Table

    table = Table(box=None, title=f"{title}; ms a step: median ± interquartile range", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in ("schedule", "stages") else "right")
    for row, loss in zip(rows, differences, strict=True):
        table.add_row(*cells(row, loss))
    return table


def _in_a_row(quiet: bool) -> dict[str, Any]:
    from optpipe_runtime.bench.in_a_row import METHOD, load

    row = _measured(RANKS, "in_a_row", load)
    if not quiet:
        typer.echo(
            f"{row.steps} steps in a row by {METHOD} on {RANKS} ranks, with a norm over all gradients: "
            f"{row.post_validated_ms:.0f} ms, {row.deviation:+.1%} against {row.steps} spans of {row.span_ms:.1f} ms, "
            f"one fill and one drain; {row.clipped_ms:.0f} ms if updates wait for the norm ({row.steps} makespans of "
            f"{row.makespan_ms:.1f} ms)"
        )
    return {**asdict(row), "spans_ms": row.spans_ms, "deviation": row.deviation}


def _host(quiet: bool) -> dict[str, Any]:
    from optpipe_runtime.bench.overhead import beside, lowering, overhead
    from optpipe_runtime.bench.swap import load

    op, gpt, schedule, swap = overhead(), beside(), lowering(), _measured(COMPUTING_RANKS, "swap", load)
    if not quiet:
        typer.echo(
            f"an op: {op.op_us:.0f} µs of host time beyond a plain run ({op.step_ms:.1f} against "
            f"{op.plain_ms:.1f} ms, {op.ops} ops)"
        )
        typer.echo(
            "a step of eight GPT blocks with tiny tensors, relative to a plain run: "
            + ", ".join(f"{name} {ratio:.2f}" for name, ratio in gpt.ratios.items())
            + f" ({gpt.plain_ms:.1f} ms)"
        )
        typer.echo(
            f"a traced step: {op.traced_ratio:.3f} times the host's time, {op.followed_ratio:.3f} on average where a "
            "Follower traces"
        )
        typer.echo(
            f"a schedule of {schedule.ops} ops: {schedule.prepare_ms:.0f} ms in a thread beside the training "
            "until a rank can run it"
        )
        typer.echo(
            f"a swap: a step takes {swap.ratio:.3f} times its time, {swap.prepared_ratio:.3f} while the offer is "
            "prepared "
            f"({swap.step_ms:.1f} ms without, {swap.swaps} swaps)"
        )
    return {
        "op": asdict(op) | {"op_us": op.op_us, "traced_ratio": op.traced_ratio, "followed_ratio": op.followed_ratio},
        "beside": asdict(gpt),
        "lowering": asdict(schedule),
        "swap": asdict(swap) | {"ratio": swap.ratio},
    }
