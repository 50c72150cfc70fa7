"""What the commands print: figures as a table or, with `--json`, as JSON; files written only where that can succeed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.errors import InputError

if TYPE_CHECKING:
    from optpipe.anytime import Result

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
INFEASIBLE = 3  # exit code


def print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=1))


def require_writable(path: Path | None) -> None:
    """Before a long search: an answer that could not be saved would be lost. Leaves no file where there was none."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: is a folder, a file was expected")
    known = path.exists()
    try:
        with path.open("ab"):
            pass
        if not known:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def figures(result: Result) -> dict[str, Any]:
    """A result's figures for people and programs; what is not known is None."""
    schedule = result.schedule
    content: dict[str, Any] = {
        "status": result.status,
        "method": result.method or None,
        "makespan_ms": result.makespan_ms,
        "span_ms": result.span_ms,
        "percentile_ms": result.percentile_ms,
        "lower_bound_ms": result.lower_bound_ms,
        "gap": result.gap,
        "bubble": schedule.timeline.bubble if schedule else None,
        "time_s": round(result.time_s, 3),
    }
    if schedule:
        from optpipe.schedule import certify

        content["placement"] = (
            schedule.placement.model_dump(mode="json", exclude_none=True) if schedule.placement else None
        )
        content["peak_bytes"] = [peak.bytes for peak in certify(schedule.problem, schedule).device]
    if result.history:
        content["incumbents"] = [asdict(step) for step in result.history]
    if result.reason:
        content["reason"] = result.reason
    if result.notes:
        content["notes"] = list(result.notes)
    return content


def summary(result: Result) -> str:
    """One line: `570 ms by cyclic, bubble 21.4%, at most 7.9% above the optimum (bound 525 ms)`."""
    if result.schedule is None:
        return f"{result.status}: {result.reason}"
    noisy = (
        ""
        if result.percentile_ms is None
        else f", with noise within {result.percentile_ms:.6g} ms in 95% of all iterations"
    )
    placed = f" with {result.schedule.placement}" if result.schedule.placement else ""
    line = (
        f"{result.objective_ms:.6g} ms by {result.method}{placed}{noisy}, bubble {result.schedule.timeline.bubble:.1%}"
    )
    if result.status == "optimal":
        return f"{line}, proven optimal"
    if result.gap is None or result.lower_bound_ms is None:
        return line
    return f"{line}, gap {result.gap:.1%} to the lower bound {result.lower_bound_ms:.6g} ms"
