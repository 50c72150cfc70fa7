"""The 35 rows of OptPipe's Table 1, predicted and solved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.papers.calibration import BASELINES, PIPEOFFLOAD, PREDICTED, Posed, Row, posed, table
from benchmarks.results_file import Results, ResultsPath
from benchmarks.tables import head, line, text
from optpipe.comparison import SOLVER, compare
from optpipe.errors import InputError
from optpipe.evaluate.objective import Objective, length_ms, shorter
from optpipe.options import CompareOptions, ObjectiveOption, TimeLimit
from optpipe.schedule import Schedule
from optpipe_cli.options import Options
from optpipe_cli.output import waiting

COLUMNS = ("row", "k", "room", *BASELINES, "optpipe", "ours", "bound", "any stages")
FASTER = 1.3  # than PipeOffload, wherever only offload fits
CLAIMED = (0.5, 1.2, 1.3)  # less idle time; faster than PipeOffload where memory is short, and where there is enough


@dataclass(frozen=True)
class Answer:
    """A row, what is predicted of each baseline, and what our solver finds. Times in ms.

    `ours_ms` and `bound_ms` are for one stage a device, as in the paper, `any_ms` for any chunks of the same layers.
    `held` has PipeOffload's and our peaks by device, as shares of the budget.
    """

    posed: Posed
    predicted_ms: dict[str, float]
    ours_ms: float | None
    bound_ms: float | None
    any_ms: float | None
    held: tuple[list[float], list[float]]

    @property
    def row(self) -> Row:
        return self.posed.row

    @property
    def best_ms(self) -> float:
        """The shorter of our two answers."""
        return min((ms for ms in (self.ours_ms, self.any_ms) if ms is not None), default=float("inf"))

    @property
    def best_baseline_ms(self) -> float:
        """The shortest of the baselines that fit."""
        return min(ms for method, ms in self.predicted_ms.items() if self.posed.fits(method))


class TableOptions(CompareOptions):
    """Those of the paper's runs."""

    objective: ObjectiveOption = "span"
    time_limit_s: TimeLimit = 60.0


def table1(*, options: Options[TableOptions] = TableOptions(), rows: str = "1-35", results: ResultsPath = None) -> None:
    """Reproduce OptPipe's Table 1: what columns 1F1B and PipeOffload say of the others, and our solver on every row.

    The paper's runs use post-validation, hence the span. A search's time limit counts for the stages as given, and once
    more for any stages.

    Parameters
    ----------
    rows
        Which rows of the table, such as 1-5.
    """
    chosen, kept = _chosen(rows), Results(results, "table1", ("number",), options)
    answers = []
    print(head(COLUMNS, "l" + "r" * (len(COLUMNS) - 1)))
    for each in posed(chosen, options.objective):
        with waiting(str(each.row)):
            row = kept.find(each.row.number) or kept.add(_solved(each, options))
        answers.append(answer := _answer(each, row, options.objective))
        print(line(_cells(answer)))
    print()
    for teller in (memory, errors, goals, claims):
        for name, sentence in teller(answers):
            print(f"- {name}: {sentence}")


def _chosen(rows: str) -> Sequence[Row]:
    match, most = re.fullmatch(r"(\d+)(?:-(\d+))?", rows), len(table())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= most:
        raise InputError(f"--rows = {rows!r}: a number or a range within 1-{most} was expected, such as 1-5")
    return table()[first - 1 : last]


def _solved(each: Posed, options: CompareOptions) -> dict[str, Any]:
    """What our solver finds of a row."""
    results = {
        row.placements: row.result
        for row in compare(each.problem, [SOLVER], **options.search()).rows
        if row.result.schedule
    }
    as_given, free = results.get("keep"), results.get("all")
    return {
        "number": each.row.number,
        "ours_ms": as_given.value_ms if as_given else None,
        "bound_ms": as_given.lower_bound_ms if as_given else None,
        "any_ms": free.value_ms if free else None,
        "held": _held(as_given.schedule if as_given else None, each),
    }


def _answer(each: Posed, row: dict[str, Any], objective: Objective) -> Answer:
    return Answer(
        each,
        {method: length_ms(schedule, objective) for method, schedule in each.baselines.items()},
        row["ours_ms"],
        row["bound_ms"],
        row["any_ms"],
        (_held(each.baselines[PIPEOFFLOAD], each), row["held"]),
    )


def _held(schedule: Schedule | None, each: Posed) -> list[float]:
    """The peak of each device over the budget; nothing without a schedule."""
    budget = each.problem.devices[0].activation_budget_bytes
    return [peak.bytes / budget for peak in schedule.compiled.certificate.device] if schedule else []


def _cells(answer: Answer) -> list[str]:
    row = answer.row
    cells = [str(row), f"{answer.posed.k:.2f}", f"{answer.posed.room:.1f}"]
    for method in BASELINES:
        published, fits = row.published[method], answer.posed.fits(method)
        wrong = " ≠" if fits != (published is not None) else ""
        ours = f"{answer.predicted_ms[method]:.0f}" if fits else "OOM"
        theirs = f" / {published:.0f}" if published is not None else " / OOM"
        cells.append(ours + theirs + wrong)
    figures = (row.published["optpipe"], answer.ours_ms, answer.bound_ms, answer.any_ms)
    return [*cells, *(text(ms, ".0f") for ms in figures)]


def memory(answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """Where runs end out of memory, and what devices use."""
    cells = [(answer, method) for answer in answers for method in BASELINES]
    wrong = [
        f"{method} in {answer.row}"
        for answer, method in cells
        if answer.posed.fits(method) != (answer.row.published[method] is not None)
    ]
    yield "out of memory, by the budget that agrees with most runs", _count(cells, wrong)
    for who, name in enumerate(("PipeOffload", "our schedules")):  # the paper's Figure 5
        shares = [share for answer in answers if answer.row.only_offload_fits for share in answer.held[who]]
        if shares:
            sentence = f"{min(shares):.0%} to {max(shares):.0%} of the budget, {fmean(shares):.0%} on average"
            yield f"memory that devices use where only offload fits, {name}", sentence


def errors(answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """By column that no time is taken from: predicted over published, less 1."""
    for method in (*PREDICTED, "optpipe"):
        off = [
            ours / published - 1
            for answer in answers
            if (published := answer.row.published[method]) is not None
            and (ours := answer.ours_ms if method == "optpipe" else answer.predicted_ms[method]) is not None
        ]
        if off:
            sizes = f"median {median(off):+.1%}, from {min(off):+.1%} to {max(off):+.1%}"
            name = "our schedules against the paper's OptPipe" if method == "optpipe" else f"{method}, predicted"
            yield name, f"{sizes} in {len(off)} rows"


def goals(answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """What our schedules are to show, in simulation."""
    behind = [str(answer.row) for answer in answers if shorter(answer.best_baseline_ms, answer.best_ms)]
    yield "no slower than the best baseline that fits", _count(answers, behind)
    short = [answer for answer in answers if answer.row.only_offload_fits]
    gains = {str(answer.row): answer.predicted_ms[PIPEOFFLOAD] / answer.best_ms for answer in short}
    if gains:
        slower = [row for row, gain in gains.items() if gain < FASTER]
        name = f"{FASTER} times faster than PipeOffload where only offload fits"
        yield name, f"{_count(short, slower)}; the least is {min(gains.values()):.2f}"
    late = [str(a.row) for a in answers if shorter(a.row.published["optpipe"] or 0.0, a.best_ms)]
    yield "no slower, simulated, than the paper's OptPipe, measured", _count(answers, late)
    alike = [str(a.row) for a in answers if a.ours_ms is None or shorter(a.row.published["optpipe"] or 0.0, a.ours_ms)]
    yield "the same with one stage a device, as the paper has it", _count(answers, alike)
    for where, some in (("", answers), (", 4 GPUs", [a for a in answers if a.row.gpus == 4])):  # typically optimal: 5.2
        if gaps := [1 - a.bound_ms / a.ours_ms for a in some if a.bound_ms and a.ours_ms]:
            proven = sum(each < 1e-9 for each in gaps)
            sentence = f"{proven} of {len(gaps)} proven optimal, median {median(gaps):.1%}, at most {max(gaps):.1%}"
            yield f"gap to the bound, one stage a device{where}", sentence


def claims(answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """The paper's three claims (abstract, section 5.2): of its own figures, then of our schedules in simulation."""
    for who in ("the paper's OptPipe", "ours"):
        idle: list[float] = []
        short: list[float] = []
        ample: list[float] = []
        for answer in answers:
            row = answer.row
            mine = answer.best_ms if who == "ours" else row.published["optpipe"] or 0.0
            rival = row.published[PIPEOFFLOAD] or 0.0
            (short if row.only_offload_fits else ample).append(rival / mine)
            idle.append(1 - answer.posed.idle_ms(mine) / answer.posed.idle_ms(rival))
        less, faster, much_faster = CLAIMED
        most = sum(each >= less for each in idle)
        yield f"{less:.0%} less idle time than PipeOffload, {who}", f"{most} of {len(idle)}, at most {max(idle):.0%}"
        for ratios, claim, where in ((short, faster, "only offload"), (ample, much_faster, "another method")):
            if ratios:
                met = sum(each > claim for each in ratios)
                name = f"more than {claim - 1:.0%} faster than PipeOffload where {where} fits, {who}"
                yield name, f"{met} of {len(ratios)}, at least {min(ratios) - 1:.1%}"


def _count(answers: Sequence[object], failed: Sequence[str]) -> str:
    return f"{len(answers) - len(failed)} of {len(answers)}" + (f"; not {', '.join(failed)}" if failed else "")
