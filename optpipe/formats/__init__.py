"""`export_schedule` and `import_schedule`: between schedules and the forms of other programs, by their names. None of
those programs is imported here."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from optpipe.errors import InputError, ScheduleError, did_you_mean
from optpipe.evaluate.rows import Rows
from optpipe.files import parse_json, read_text
from optpipe.formats import megatron, primus, torch_csv, torch_memory
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program, of_kinds
from optpipe.schedule import Schedule, ScheduleFile
from optpipe.text import distinct_sizes

log = logging.getLogger("optpipe.formats")


def _file_text(schedule: Schedule) -> str:
    return ScheduleFile.from_schedule(schedule).to_json() + "\n"


WRITERS: dict[str, Callable[..., str | list[list[str]]]] = {  # a text, or rows of cells with commas between
    "torch-csv": partial(torch_csv.rows, messages=False),
    "torch-comms": partial(torch_csv.rows, messages=True),
    "torch-comms-waits": partial(torch_csv.rows, messages=True, waits=True),
    "megatron": megatron.write,
    "primus": primus.write,
    "json": _file_text,
}


@dataclass(frozen=True)
class Export:
    """A schedule as another program will run it."""

    text: str  # what that program reads
    schedule: Schedule  # what it runs
    costs: tuple[str, ...]  # where offloads were left out: each device's memory with them and without, as a sentence
    misfits: tuple[str, ...]  # a sentence for each device that needs more memory than it has
    notes: tuple[str, ...] = ()  # what is not counted, and where the program would compute something else


def export_schedule(
    schedule: Schedule,
    to: str,
    without_offload: bool = False,
    whole_backwards: bool = False,
    message_bytes: int | None = None,
    gather_ms: float | None = None,
    gathered_bytes: int | None = None,
    mtp: int = 0,
) -> str:
    """A schedule in the form that another program reads. If that does not fit the memory there, that is logged.

    Raises InputError if there is no such form, or it cannot express an op or the order; ScheduleError if the schedule
    cannot run.

    Parameters
    ----------
    to
        `torch-csv`: rows of compute actions for PyTorch's pipelining. `torch-comms`: rows with all messages, which it
        runs as they are, up to torch 2.13. `torch-comms-waits`: the same for torch 2.15, which wants waits among them.
        `megatron`: arguments of Megatron-LM, where its own order is the schedule's. `primus`: the table of nodes of AMD
        Primus' pipeline launcher. `json`: the schedule file, the only form that has everything.
    without_offload
        Leave out O, D and R. The schedule then needs the memory that `certify` says of `leave_out_offload(schedule)`.
    whole_backwards
        Write each B and its W as one BW, for replicas in PyTorch's pipelining.
    message_bytes
        The bytes of a message between stages. Buffers of messages count then: up to torch 2.13 of all that a device
        receives, in 2.15 (`torch-comms-waits`) of those that it has at once.
    gather_ms, gathered_bytes
        For stages in FSDP: how long it takes to gather the parameters of one, by which rows with messages gather stages
        in time and shard them again in between (default: once a step), and their bytes, which count then.
    mtp
        For Megatron, how many multi-token prediction modules the layer before the head stands for.
    """
    exported = export(schedule, to, without_offload, whole_backwards, message_bytes, gather_ms, gathered_bytes, mtp)
    for misfit in exported.misfits:
        log.warning("the exported schedule does not fit: %s", misfit)
    for note in exported.notes:
        log.info("%s", note)
    return exported.text


def export(
    schedule: Schedule,
    to: str,
    without_offload: bool = False,
    whole: bool = False,
    message_bytes: int | None = None,
    gather_ms: float | None = None,
    gathered_bytes: int | None = None,
    mtp: int = 0,
) -> Export:
    """`export_schedule` with what it costs: the one function of all that hand out a schedule in another form."""
    if to not in WRITERS:
        raise InputError(f"to = {to!r}: one of {', '.join(WRITERS)} is expected{did_you_mean(to, WRITERS, '; ')}")
    exported = leave_out_offload(schedule) if without_offload else schedule
    exported = torch_memory.whole_backwards(exported) if whole else exported
    if gather_ms is not None and not (to.startswith("torch-comms") and gather_ms >= 0):
        raise InputError(f"gather_ms = {gather_ms:g}: only torch-comms and torch-comms-waits gather, in at least 0 ms")
    if mtp and (to != "megatron" or not (mtp > 0 and schedule.problem.layers)):
        raise InputError(f"mtp = {mtp}: expected a count, for megatron and a problem with layers")
    for name, size in (("message_bytes", message_bytes), ("gathered_bytes", gathered_bytes)):
        if size is not None and not to.startswith("torch"):
            raise InputError(f"{name} = {size}: only what is for PyTorch counts them")
    how = {"gather_ms": gather_ms} if gather_ms is not None else {"mtp": mtp} if mtp else {}
    written, as_run, notes = WRITERS[to](exported, **how), exported, tuple[str, ...]()
    if to == "primus":
        as_run = primus.as_run(exported)
    elif not isinstance(written, str):
        as_run, notes = torch_memory.in_torch(exported, to, written, message_bytes, gathered_bytes)
    peaks = [each.compiled.certificate.device for each in (schedule, as_run)]
    costs = []
    for d, (with_it, peak) in enumerate(zip(*peaks, strict=True)) if without_offload else ():
        needed, offloaded, limit = distinct_sizes(peak.bytes, with_it.bytes, peak.limit or 0)
        verdict = "" if peak.fits else f", more than the {limit} it has"
        costs.append(f"device {d}: {needed} of activations, {offloaded} with offload{verdict}")
    text = written if isinstance(written, str) else "".join(",".join(row) + "\n" for row in written)
    return Export(text, as_run, tuple(costs), tuple(as_run.compiled.certificate.complaints()), notes)


def leave_out_offload(schedule: Schedule) -> Schedule:
    """The schedule with all activations left on their devices: without its O, D and R."""
    return schedule.with_tables(lambda table: table[~of_kinds(table, Kind.O, Kind.D, Kind.R)])


def import_schedule(path: str | Path, problem: Problem) -> Schedule:
    """Reads a schedule that another program wrote, for `problem`.

    A file named `.csv` has PyTorch's actions, with messages or without; one that names a pipeline's size has arguments
    of Megatron, whose stages the schedule's problem has; any other has op texts, one line a device or JSON. Line d + 1
    is the program of device d. Raises InputError for what cannot be read, or is not of this problem; `check` lists what
    else is wrong.
    """
    text, what = read_text(path), str(path)
    arguments, rest = megatron.take_arguments(text)
    if "pp" in arguments:
        return megatron.read(arguments, rest, problem)
    rows = what.lower().endswith(".csv")
    schedule = torch_csv.read(text, problem, what) if rows else _read_op_texts(text, problem, what)
    for d, program in enumerate(schedule.programs):
        try:
            Rows(program.table, np.full(len(program), d)).require_known(problem)
        except ScheduleError as error:
            raise InputError(f"{what}, {'line' if rows else 'program'} {d + 1}: {error}") from None
    return schedule


def _read_op_texts(text: str, problem: Problem, what: str) -> Schedule:
    """The schedule of programs as op texts: one line a device with its ops between spaces, or JSON, a list for each."""
    is_json = text.lstrip().startswith("[")
    lists = parse_json(text, what) if is_json else [re.findall(r"[^\s,]+", line) for line in text.rstrip().splitlines()]
    if len(lists) != (devices := len(problem.devices)):
        raise InputError(f"{what}: {len(lists)} programs, the problem has {devices} devices: one is expected for each")
    programs = []
    for n, texts in enumerate(lists, 1):
        if not (isinstance(texts, list) and all(isinstance(op, str) for op in texts)):
            raise InputError(f"{what}, program {n}: a list of op texts is expected, such as ['0F0', '0BW0']")
        try:
            programs.append(Program.parse(texts))
        except InputError as error:
            raise InputError(f"{what}, program {n}: {error}") from None
    return Schedule(problem, tuple(programs))
