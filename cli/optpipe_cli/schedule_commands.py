"""Commands for schedule files: `check`, `simulate`, `show`, and to and from other programs `export` and `import`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt

from optpipe.errors import InputError
from optpipe.evaluate.objective import gap, raises, reaches
from optpipe.files import read_text, write_file
from optpipe.formats import export as exported_as
from optpipe.formats import import_schedule
from optpipe.formats.megatron import layer_counts
from optpipe.formats.modules import AUTOMODEL, TORCHTITAN, read_parts
from optpipe.formats.modules import complaints as module_complaints
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, ScheduleFile, TimedOp, certify, timed_ops
from optpipe.schedule import check as complaints
from optpipe.schedule import simulate as times
from optpipe.show.page import plot
from optpipe.show.svg import gantt
from optpipe.show.terminal import chart
from optpipe.show.trace import trace as trace_text
from optpipe.text import printable
from optpipe_cli.model import read_model
from optpipe_cli.options import Flag, Json, NewFile, Output, ProblemPath, SchedulePath, require_writable
from optpipe_cli.output import echo, new_console, print_json, sizes_text
from optpipe_solver.bounds import lower_bound

TOLERANCE = 1e-6  # of a claimed time, which may have been rounded


def check(
    problem: ProblemPath,
    schedule: SchedulePath,
    /,
    *,
    modules: Annotated[
        Path | None, Parameter(help="A file with module_fqns_per_model_part, as torchtitan or AutoModel takes it.")
    ] = None,
    model: Annotated[str | None, Parameter(help="Its config.json, whose modules --modules is to have.")] = None,
    json: Json = False,
) -> None:
    """`optpipe check`."""
    posed, file, placed = _read(problem, schedule)
    is_filed = file.problem.sha256 == posed.sha256
    sizes = sizes_text(file.problem), sizes_text(posed)
    if not file.placement and sizes[0] != sizes[1]:  # one complaint, not one for each op
        name, made_for = printable(posed.name) or "a problem", printable(file.problem.name) or "a problem"
        wrong = [f"the schedule was made for {made_for} ({sizes[0]}), not for {name} ({sizes[1]})"]
    else:
        wrong = complaints(posed, placed)
    if file.placement and not is_filed:
        difference = _difference(posed.to_dict() | {"name": ""}, file.problem.to_dict() | {"name": ""})
        other = f"placement = {file.placement}: does not make the problem in the file of this one: {difference}"
        wrong = [other, *wrong]
    if is_filed:
        wrong = wrong or _false_claims(file, placed)
        if not wrong:
            _bound_proven_here(file)
    if model is not None and modules is None:
        raise InputError(f"--model {model}: --modules names the file with the lists that are compared with it")
    if modules is not None:
        wrong = [*wrong, *_wrong_modules(placed.problem, modules, model)]
    _print_verdict(placed, wrong, json)


def _wrong_modules(problem: Problem, path: Path, model: str | None) -> list[str]:
    """What is wrong with the modules of each stage that a file has."""
    if problem.layers is None:
        raise InputError(f"--modules {path}: the problem has no layers, so that nothing says which a stage has")
    counts = layer_counts(problem)
    counts[0] -= 1  # the embedding
    counts[-1] -= 1  # the head
    own = read_model(model).modules if model is not None else None
    parts = read_parts(read_text(path), str(path))
    return [f"{path}: {each}" for each in module_complaints(parts, counts, (TORCHTITAN, own or AUTOMODEL))]


def _bound_proven_here(file: ScheduleFile) -> float | None:
    """Return the bound computed here of the problem in a file that has one, whoever wrote it; note it if the file's is
    higher."""
    if file.lower_bound_ms is None:
        return None
    bound_ms = lower_bound(file.problem)
    if raises(file.lower_bound_ms, bound_ms):
        claim = f"the file's lower bound of {file.lower_bound_ms:.6g} ms"
        echo(f"note: {claim} is not proven here, one of {bound_ms:.6g} ms is; optpipe solve searches", err=True)
    return bound_ms


def _print_verdict(schedule: Schedule, wrong: list[str], json: bool) -> None:
    """Print what `check` finds; exit code 1 if anything is wrong."""
    problem = schedule.problem
    if json:
        content = {"valid": not wrong, "complaints": wrong}
        if not wrong:
            certificate = certify(problem, schedule)
            content |= {
                "makespan_ms": schedule.makespan_ms,
                "peak_bytes": [peak.bytes for peak in certificate.device],
                "host_peak_bytes": [peak.bytes for peak in certificate.host],
            }
        print_json(content)
    elif not wrong:
        devices = len(problem.devices)
        echo(f"valid: it runs in {schedule.makespan_ms:.6g} ms and fits the memory of all {devices} devices")
    for complaint in wrong if not json else ():
        for line in complaint.split("\n"):  # a deadlock's has a grid
            echo(line)
    if wrong:
        raise SystemExit(1)


def _difference(posed: Any, in_file: Any, place: str = "") -> str | None:
    """The first place in which two JSON values differ, with both values."""
    if isinstance(posed, dict) and isinstance(in_file, dict):
        steps = [(f"{place}.{name}".lstrip("."), posed.get(name), in_file.get(name)) for name in {**posed, **in_file}]
    elif isinstance(posed, list) and isinstance(in_file, list):
        steps = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip_longest(posed, in_file))]
    else:
        return None if posed == in_file else f"{place} = {posed}, in the file {in_file}"
    return next(filter(None, (_difference(one, other, deeper) for deeper, one, other in steps)), None)


def _false_claims(file: ScheduleFile, schedule: Schedule) -> list[str]:
    """Complaints about wrong times in the file, a bound above its makespan, and `optimal` without a proof."""
    claims = [("makespan_ms", file.makespan_ms, schedule.makespan_ms), ("span_ms", file.span_ms, schedule.span_ms)]
    wrong = [
        f"{name} = {claim:.9g}: the programs take {true:.9g}"
        for name, claim, true in claims
        if claim is not None and abs(claim - true) > TOLERANCE * (1 + true)
    ]
    if file.ops is not None:
        wrong += _false_times(file.ops, schedule)
    if file.lower_bound_ms is not None and not reaches(file.lower_bound_ms, schedule.makespan_ms):
        wrong.append(f"lower_bound_ms = {file.lower_bound_ms:.9g}: above the makespan {schedule.makespan_ms:.9g}")
    if file.status == "optimal" and gap(schedule.makespan_ms, file.lower_bound_ms) != 0:
        wrong.append(f"status = 'optimal': lower_bound_ms = {file.lower_bound_ms} does not prove it")
    return wrong


def _false_times(claimed: Sequence[TimedOp], schedule: Schedule) -> list[str]:
    """A complaint about the first op whose times in the file are not those of the programs."""
    true = {_op_of(TimedOp(**each)): (each["start_ms"], each["end_ms"]) for each in timed_ops(schedule)}
    wrong = []
    for each in claimed:
        op, claim = _op_of(each), (each.start_ms, each.end_ms)
        if op not in true:
            wrong.append(f"{op}: the programs do not have it, or not so often")
        elif any(abs(one - ms) > TOLERANCE * (1 + ms) for one, ms in zip(claim, true[op], strict=True)):
            given, right = (" to ".join(f"{ms:.9g}" for ms in each) for each in (claim, true[op]))
            wrong.append(f"{op} from {given} ms: by the programs from {right} ms")
        true.pop(op, None)
    wrong += [f"{op} is missing" for op in true]
    more = f", and {len(wrong) - 1} more" if wrong[1:] else ""
    return [f"ops: {wrong[0]}{more}"] if wrong else []


def _op_of(timed: TimedOp) -> Op:
    return Op(Kind[timed.kind], timed.stage, timed.microbatch, timed.part or 0)


def simulate(problem: ProblemPath, schedule: SchedulePath, /, *, json: Json = False) -> None:
    """`optpipe simulate`."""
    posed, _, placed = _read(problem, schedule)
    timeline = times(posed, placed)
    content = {"makespan_ms": timeline.makespan_ms, "span_ms": timeline.span_ms, "bubble": timeline.bubble}
    if json:
        print_json({**content, "ops": timed_ops(placed)})
    else:
        echo(f"makespan {timeline.makespan_ms:.6g} ms, span {timeline.span_ms:.6g} ms, bubble {timeline.bubble:.1%}")


def show(
    schedule: SchedulePath,
    /,
    *,
    html: Annotated[NewFile, Parameter(help="Write the interactive picture here, as a page.")] = None,
    before: Annotated[Path | None, Parameter(help="A schedule of the same work, to compare with on the page.")] = None,
    svg: Annotated[NewFile, Parameter(help="Write the picture without interaction here.")] = None,
    trace: Annotated[NewFile, Parameter(help="Write a trace for Perfetto here.")] = None,
    json: Json = False,
) -> None:
    """`optpipe show`."""
    if before and not html:
        raise InputError(f"--before {before}: two schedules are compared on a page, which --html names")
    file = ScheduleFile.load(schedule)
    shown = file.schedule()
    earlier = Schedule.load(before) if before else None
    if html:
        plot(shown, earlier, _bound_proven_here(file)).save(html)
    if svg:
        write_file(svg, gantt(shown))
    if trace:
        write_file(trace, trace_text(shown))
    if json:
        content = {"makespan_ms": shown.makespan_ms, "span_ms": shown.span_ms, "method": shown.method}
        print_json(content | {"ops": timed_ops(shown)})
    elif written := [str(file) for file in (html, svg, trace) if file]:
        echo(f"written to {', '.join(written)}")
    else:
        console = new_console()
        colours = console.is_terminal and not console.no_color
        console.print(chart(shown, console.width, console.height if console.is_terminal else None, colours))
        method = shown.method or "no named method"
        echo(f"makespan {shown.makespan_ms:.6g} ms, bubble {shown.timeline.bubble:.1%}, by {method}")


def export(
    schedule: SchedulePath,
    /,
    *,
    to: Annotated[str, Parameter(help="torch-csv, torch-comms, torch-comms-waits, megatron, primus or json.")],
    output: Output = None,
    without_offload: Annotated[Flag, Parameter(help="Leave offloads out; print what memory that costs.")] = False,
    whole_backwards: Annotated[Flag, Parameter(help="Write each B and its W as one backward.")] = False,
    message_bytes: Annotated[
        NonNegativeInt | None, Parameter(help="Of one message between stages: counts PyTorch's buffers.")
    ] = None,
    gather_ms: Annotated[
        float | None, Parameter(help="To gather a stage in FSDP: rows do so in time, not all at first.")
    ] = None,
    gathered_bytes: Annotated[NonNegativeInt | None, Parameter(help="Of a stage that FSDP has gathered.")] = None,
    mtp: Annotated[
        NonNegativeInt, Parameter(help="Prediction modules in the layer before the head, for Megatron.")
    ] = 0,
) -> None:
    """`optpipe export`."""
    exported = exported_as(
        Schedule.load(schedule), to, without_offload, whole_backwards, message_bytes, gather_ms, gathered_bytes, mtp
    )
    notes = [*(() if exported.costs else exported.misfits), *exported.notes]
    for sentence in [*exported.costs, *(f"note: {note}" for note in notes)]:
        echo(sentence, err=True)
    if output:
        write_file(output, exported.text)
    else:
        print(exported.text, end="", flush=True)


def import_(
    file: Annotated[Path, Parameter(help="PyTorch's CSV if named .csv, lists of op texts, or Megatron's arguments.")],
    /,
    *,
    problem: Annotated[Path, Parameter(help="The problem that the schedule is for.")],
    output: Annotated[Path, Parameter(name=("--output", "-o"), validator=require_writable)],
    json: Json = False,
) -> None:
    """`optpipe import`."""
    imported = import_schedule(file, Problem.load(problem))
    imported.save(output)
    _print_verdict(imported, complaints(imported.problem, imported), json)


def _read(problem: Path, schedule: Path) -> tuple[Problem, ScheduleFile, Schedule]:
    """The problem, the file, and its schedule for that problem, which may differ from the file's.

    If the file has a placement, the problem is returned with that placement, unless it is the file's problem already.
    """
    posed, file = Problem.load(problem), ScheduleFile.load(schedule)
    as_filed = file.schedule()
    if file.placement and posed.sha256 != file.problem.sha256:
        posed = file.placement.apply(posed)
    return posed, file, Schedule(posed, as_filed.programs, as_filed.links, as_filed.method)
