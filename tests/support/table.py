"""Figures that tests find, as rows of a table that `make stacks` prints."""

import json
import os
from pathlib import Path


def note(
    schedule: str,
    ranks: int,
    form: str,
    loss_difference: float | None = None,
    peak_share: float | None = None,
    step_share: float | None = None,
) -> None:
    """A row, if `OPTPIPE_STACKS_TABLE` names a file: a method, how many processes ran it, by which export or function.

    `loss_difference` is the largest of a loss from what was to be, `peak_share` the largest peak of a rank over its
    certificate, `step_share` the time of a step over what was predicted.
    """
    if file := os.environ.get("OPTPIPE_STACKS_TABLE"):
        row = {"schedule": schedule, "ranks": ranks, "form": form, "loss": loss_difference, "peak": peak_share}
        row["step"] = step_share
        with Path(file).open("a") as rows:
            rows.write(json.dumps(row) + "\n")
