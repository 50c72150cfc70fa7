"""Measurements of another program become a problem, by the name of their form: `problem_from` files, `problem_of`
texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from optpipe.errors import InputError, did_you_mean
from optpipe.measured import csv_file, megatron_timers, primus, straggler, torch_trace
from optpipe.measured.estimate import estimate, estimate_sums
from optpipe.measured.events import Events, read_pieces
from optpipe.measured.measurements import Given, Measurements
from optpipe.measured.recording import SHAPES, Recording

MEASURED = ("torch-trace", "primus", "straggler", "megatron-timers", "csv")


def problem_from(
    form: str,
    *paths: str | Path | Sequence[str | Path],
    activation_bytes: int | Sequence[int] | None = None,
    activation_budget_bytes: int | None = None,
    weight_share: float | None = None,
    microbatches: int | None = None,
    devices: int | None = None,
    chunks: int = 1,
    shape: str | None = None,
    step: int | None = None,
    replica: int | None = None,
) -> Measurements:
    """Makes a problem of what another program has measured.

    Only whole training steps count: evaluations, and steps that were cut off, are left out and named in `unused`.

    Parameters
    ----------
    form
        `torch-trace`: Chrome traces of torch.profiler, one file a rank, in which PyTorch's pipelining ran.
        `primus`: the folder that AMD's Primus writes with `dump_pp_data`.
        `straggler`: a timeline of StragglerAnalysis or ndtimeline, with several steps and replicas.
        `megatron-timers`: Megatron's log with `--timing-log-level 2 --timing-log-option all`.
        `csv`: a table with the columns stage, op, microbatch, and start_ms and end_ms, or duration_ms.
    paths
        The files of one run, each alone or in lists: of all ranks, of several replicas or of several steps. Each may be
        packed by gzip. `torch-trace` also takes folders; `primus` takes one.
    activation_bytes
        What a stage saves in a forward: of all stages, or of each. Default: 1.
    activation_budget_bytes
        What a device has for activations. Default: what the measured order holds at most; without an order no limit.
    weight_share
        The share of W in a backward whose parts were not measured, 0 to 1. Default: 0, so that a split gains nothing.
    microbatches, devices, chunks
        Of `megatron-timers`: micro-batches a step (required), devices of the pipeline (default: all ranks), stages a
        device.
    shape
        How chunks lie, looped or v, where the form does not say it (`primus`, `megatron-timers`). Default: as the times
        of `primus` tell; looped for `megatron-timers`.
    step
        The number of one step, of which the problem has each micro-batch's own times. Default: the last whole one for
        `straggler`; for other forms the medians of all steps.
    replica
        The number of a replica where several were measured. Default: the first.

    Returns
    -------
    Measurements
        The problem, the spreads, what is not known, what was not used, and what ran.

    Raises
    ------
    InputError
        If there is no such form, a file cannot be read, or lacks an op that a problem needs.
    """
    given = Given(
        [activation_bytes] if isinstance(activation_bytes, int) else activation_bytes,
        activation_budget_bytes,
        weight_share,
        step,
        replica,
    )
    run = Run(microbatches, devices, chunks, shape)
    files = [Path(path) for each in paths for path in ([each] if isinstance(each, (str, Path)) else each)]
    _require(form, len(files), given, run)
    return _problem(form, [(str(path), read_pieces(path)) for path in _files(form, files)], given, run)


def recording_from(paths: Sequence[str | Path], form: str | None, run: Run) -> tuple[str, Recording]:
    """The form of these files, and all that ran by them; arguments as of `problem_from`. Without a form it is as the
    files' names and their first events tell.

    Raises InputError if no form is like the files, or as `problem_from` does.
    """
    files = [Path(path) for path in paths]
    form = form or _form_of_all(files)
    _require(form, len(files), Given(), run)
    return form, recording_of(form, [(str(path), read_pieces(path)) for path in _files(form, files)], run)


def _form_of_all(paths: Sequence[Path]) -> str:
    forms = {form_of(path): path for path in paths}
    if len(forms) > 1:
        (one, first), (other, second) = list(forms.items())[:2]
        raise InputError(f"{first} is of the form {one}, {second} of {other}: the files of one run are expected")
    return next(iter(forms), "")


def form_of(path: Path) -> str:
    """The form of a file, or of those in a folder. Raises InputError if it is like none."""
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.is_file())
        if any(each.name.startswith("pp_rank_") for each in inside):
            return "primus"
        return form_of(_traces_in(path)[0])
    if path.name == "config.json" or path.name.startswith("pp_rank_"):
        return "primus"
    if path.name.lower().endswith((".csv", ".csv.gz")):
        return "csv"
    pieces = read_pieces(path)
    first = next(pieces, "")
    if first.lstrip()[:1] not in ("{", "["):
        if any(timer in piece for piece in chain([first], pieces) for timer in megatron_timers.TIMERS):
            return "megatron-timers"
    else:
        for event in Events(chain([first], pieces), str(path)):
            if str(event.get("name")) in straggler.KINDS:
                return "straggler"
            if torch_trace.is_torchs(event):
                return "torch-trace"
    raise InputError(
        f"{path}: like no form that is known: a timeline of StragglerAnalysis, a trace of torch.profiler or a log of "
        "Megatron's timers is expected; say which by --form"
    )


class Run(NamedTuple):
    """What a form may not say of the run that was measured; see `problem_from`."""

    microbatches: int | None = None
    devices: int | None = None
    chunks: int = 1
    shape: str | None = None


def problem_of(form: str, files: Sequence[tuple[str, str]], given: Given, run: Run) -> Measurements:
    """The same for texts with the names of their files; of `primus`, all files of the folder."""
    _require(form, 1 if form == "primus" else len(files), given, run)
    return _problem(form, [(name, [text]) for name, text in files], given, run)


def recording_of(form: str, files: Sequence[tuple[str, Iterable[str]]], run: Run) -> Recording:
    """All that ran by these files, each a name and the pieces of its text."""
    if form == "torch-trace":
        return torch_trace.read(files)
    if form == "primus":
        return primus.read({name: "".join(pieces) for name, pieces in files}, run.shape)
    if form == "straggler":
        return straggler.read(files)
    texts = [(name, "".join(pieces)) for name, pieces in files]
    return csv_file.read(texts) if form == "csv" else megatron_timers.record(texts, *_megatron_sizes(run))


def _problem(form: str, files: Sequence[tuple[str, Iterable[str]]], given: Given, run: Run) -> Measurements:
    if form != "megatron-timers":
        return estimate(recording_of(form, files, run), given)
    texts = [(name, "".join(pieces)) for name, pieces in files]
    times, where = megatron_timers.read(texts, *_megatron_sizes(run))
    measurements = estimate_sums(times, where, run.microbatches or 0, given)
    if run.shape is None and run.chunks > 1:
        return replace(measurements, unknown=("how chunks lie: looped; give --shape", *measurements.unknown))
    return measurements


def _megatron_sizes(run: Run) -> tuple[int, int | None, int, str]:
    if run.microbatches is None:
        raise InputError("microbatches is missing: Megatron's log does not say how many a step has")
    return run.microbatches, run.devices, run.chunks, run.shape or SHAPES[0]


def _require(form: str, files: int, given: Given, run: Run) -> None:
    if form not in MEASURED:
        raise InputError(
            f"form = {form!r}: one of {', '.join(MEASURED)} is expected{did_you_mean(form, MEASURED, '; ')}"
        )
    if not files:
        raise InputError(f"no file given: {form} needs at least one")
    if given.weight_share is not None and not 0 <= given.weight_share <= 1:
        raise InputError(f"weight_share = {given.weight_share:g}: a share from 0 to 1 is expected")
    if form == "megatron-timers" and (given.step, given.replica) != (None, None):
        raise InputError(f"step = {given.step}, replica = {given.replica}: Megatron's log has only sums of its steps")
    if run.shape not in (None, *SHAPES):
        raise InputError(f"shape = {run.shape!r}: one of {', '.join(SHAPES)} is expected")


def _files(form: str, paths: Sequence[Path]) -> Iterator[Path]:
    """The files of these paths: of Primus those of the one folder that they are or lie in; of torch also those of
    folders."""
    if form == "primus":
        folders = {path if path.is_dir() else path.parent for path in paths}
        dumped = any((folder / "config.json").is_file() for folder in folders)
        if len(folders) > 1 or (not dumped and not paths[0].is_dir()):
            raise InputError(f"{paths[0]}: the folder that dump_pp_data writes is expected")
        yield from sorted(folders.pop().glob("*.json"))
        return
    seen = set[Path]()
    for path in paths:
        if path.is_dir() and form != "torch-trace":
            raise InputError(f"{path}: is a folder: a file of {form} is expected")
        for file in _traces_in(path) if path.is_dir() else [path]:
            if file.resolve() in seen:
                raise InputError(f"{file}: is given twice: each file once is expected")
            seen.add(file.resolve())
            yield file


def _traces_in(folder: Path) -> list[Path]:
    """The traces in a folder; if there is none, those in its folders, as `record_trace` leaves them."""
    for inside in (folder.iterdir(), (file for each in folder.iterdir() if each.is_dir() for file in each.iterdir())):
        if traces := sorted(each for each in inside if each.is_file() and each.name.endswith((".json", ".json.gz"))):
            return traces
    raise InputError(f"{folder}: no traces in this folder: files named .json or .json.gz are expected")
