"""Tables of the documentation, so that tests can hold what stands there against what is measured or printed; and the
table that `make stacks` prints."""

import json
import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown(page: str, first: str) -> list[str]:
    """The lines of the table or list on the page that begins with `first`, but for the line below a heading. Before it
    and `: ` may stand the heading of its section."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    heading, _, first = first.rpartition(": ")
    begin = lines.index(heading) if heading else 0
    begin = next(at for at in range(begin, len(lines)) if lines[at].startswith(first))
    end = next(at for at in range(begin, len(lines)) if not lines[at] or lines[at].startswith("```"))
    return [line for line in lines[begin:end] if not re.fullmatch(r"\|[-: |]+", line)]


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is `first`, without its heading."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown(page, f"| {first} |")[1:]]


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
