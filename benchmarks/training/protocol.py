"""The paper's experiment, end to end."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from benchmarks.training.protocol_ranks import ProtocolSettings
from optpipe.options import SolveOptions
from optpipe_cli.gain import gain_of, rounds
from optpipe_cli.launch import measured_on_ranks
from optpipe_cli.options import with_options
from optpipe_runtime.demo.on_ranks import save
from optpipe_runtime.demo.train import DemoResult, Step

RANKS = 2


@with_options("SolveOptions", only=("time_limit_s", "solver"), time_limit_s=300.0)
def protocol(options: SolveOptions) -> None:
    """Train by PipeOffload, run the MILP beside it for 300 s (the paper: 1000 s on 16 GPUs), swap in each better
    schedule, also of a heuristic that the search starts from, and measure what it gains."""
    _show(run(ProtocolSettings(milp_s=options.time_limit_s, solver=options.solver)))


def run(settings: ProtocolSettings) -> dict[str, Any]:
    """Run the protocol on two ranks of this machine; return what was offered, and what the best schedule gains."""
    with tempfile.TemporaryDirectory(prefix="optpipe-protocol-") as folder:
        asked = Path(folder) / "settings.json"
        save(settings, asked)
        content: dict[str, Any] = measured_on_ranks(RANKS, "benchmarks.training.protocol_ranks", asked)
    training = content.pop("training")
    result = DemoResult(training["problem"], training["schedules"], [Step(**step) for step in training["steps"]])
    predicted = [schedule["predicted_ms"] for schedule in result.schedules]
    best = min(range(len(predicted)), key=predicted.__getitem__)
    gain = gain_of(rounds(result, best, settings.training.rounds))._asdict() if best else None
    first, chosen = result.schedules[0], result.schedules[best]
    return content | {
        "solver": settings.solver,
        "cores": os.cpu_count(),
        "swaps": Counter(offered["method"] for offered in content["offered"]),
        "steps_beside": sum(step.live for step in result.steps),
        "first": {"method": first["method"], "predicted_ms": predicted[0]},
        "best": {"method": chosen["method"], "predicted_ms": predicted[best]},
        "measured_gain": gain,
    }


def _show(content: dict[str, Any]) -> None:
    first, best, gain = content["first"], content["best"], content["measured_gain"]
    typer.echo(f"training starts by {first['method']}, {first['predicted_ms']:.4g} ms predicted")
    for offered in content["offered"]:
        at = f"after {offered['time_s']:.1f} s, step {offered['step']}"
        typer.echo(f"{at}: {offered['predicted_ms']:.4g} ms by {offered['method']}")
    typer.echo(f"the MILP's answer: {content['answer']}")
    for note in content["notes"]:
        typer.echo(f"note: {note}")
    by = ", ".join(f"{count} by {method}" for method, count in content["swaps"].items()) or "none"
    typer.echo(f"swaps: {by}")
    typer.echo(f"{content['steps_beside']} steps beside {content['milp_s']:.0f} s of search")
    if gain is None:
        typer.echo("nothing is shorter than the first schedule")
    else:
        predicted = 1 - best["predicted_ms"] / first["predicted_ms"]
        within = f"95% of resamples between {gain['low']:.1%} and {gain['high']:.1%}"
        typer.echo(f"gain of {best['method']}: {predicted:.1%} predicted, {gain['median']:.1%} measured, {within}")
