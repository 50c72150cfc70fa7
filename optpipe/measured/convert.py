"""Measurements of another program become a problem, by the name of their form: `problem_from` files, `problem_of`
texts."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from optpipe.errors import InputError, did_you_mean
from optpipe.measured import csv_file, megatron_timers, primus, straggler, torch_trace
from optpipe.measured.estimate import Given, Measurements, estimate, estimate_sums
from optpipe.measured.recording import SHAPES
from optpipe.model.problem import read_file, read_text

GZIP = b"\x1f\x8b"  # what every file packed by gzip begins with
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
        The files, each alone or in lists; one, but for `torch-trace`, which also takes a folder with the files of all
        ranks. Each may be packed by gzip.
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
    files = list(_files(form, files))
    return problem_of(form, [(str(path), read_packed(path)) for path in files], given, run)


class Run(NamedTuple):
    """What a form may not say of the run that was measured; see `problem_from`."""

    microbatches: int | None = None
    devices: int | None = None
    chunks: int = 1
    shape: str | None = None


def problem_of(form: str, files: Sequence[tuple[str, str]], given: Given, run: Run) -> Measurements:
    """The same for texts with the names of their files; of `primus`, all files of the folder."""
    _require(form, 1 if form == "primus" else len(files), given, run)
    name, text = files[0] if files else ("", "")
    if form != "megatron-timers":
        read = {
            "torch-trace": lambda: torch_trace.read(files),
            "primus": lambda: primus.read(dict(files), run.shape),
            "straggler": lambda: straggler.read(text, name),
            "csv": lambda: csv_file.read(text, name),
        }
        return estimate(read[form](), given)
    if run.microbatches is None:
        raise InputError("microbatches is missing: Megatron's log does not say how many a step has")
    times, where = megatron_timers.read(text, name, run.microbatches, run.devices, run.chunks, run.shape or SHAPES[0])
    measurements = estimate_sums(times, where, run.microbatches, given)
    if run.shape is None and run.chunks > 1:
        return replace(measurements, unknown=("how chunks lie: looped; give --shape", *measurements.unknown))
    return measurements


def _require(form: str, files: int, given: Given, run: Run) -> None:
    if form not in MEASURED:
        raise InputError(
            f"form = {form!r}: one of {', '.join(MEASURED)} is expected{did_you_mean(form, MEASURED, '; ')}"
        )
    if not files or (files > 1 and form in ("straggler", "megatron-timers", "csv")):
        raise InputError(f"{files} files: {'some are' if form == 'torch-trace' else 'one is'} expected of {form}")
    if given.weight_share is not None and not 0 <= given.weight_share <= 1:
        raise InputError(f"weight_share = {given.weight_share:g}: a share from 0 to 1 is expected")
    if form == "megatron-timers" and (given.step, given.replica) != (None, None):
        raise InputError(f"step = {given.step}, replica = {given.replica}: Megatron's log has only sums of its steps")
    if run.shape not in (None, *SHAPES):
        raise InputError(f"shape = {run.shape!r}: one of {', '.join(SHAPES)} is expected")


def _files(form: str, paths: Sequence[Path]) -> Iterator[Path]:
    """The files of these paths: of Primus those of the one folder that they are or lie in; of torch also those of a
    folder."""
    if form == "primus":
        folders = {path if path.is_dir() else path.parent for path in paths}
        dumped = any((folder / "config.json").is_file() for folder in folders)
        if len(folders) > 1 or (not dumped and not paths[0].is_dir()):
            raise InputError(f"{paths[0]}: the folder that dump_pp_data writes is expected")
        yield from sorted(folders.pop().glob("*.json"))
        return
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        if path.is_dir() and form != "torch-trace":
            raise InputError(f"{path}: is a folder: a file of {form} is expected")
        traces = [each for each in inside if each.name.endswith((".json", ".json.gz"))]
        if path.is_dir() and not traces:
            raise InputError(f"{path}: no traces in this folder: files named .json or .json.gz are expected")
        yield from traces or [path]


def read_packed(path: Path) -> str:
    """The text of a file, which may be packed by gzip, whatever its name is."""
    content = read_file(path)
    if not content.startswith(GZIP):
        return read_text(path)
    try:
        return gzip.decompress(content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: no text packed by gzip: {error}") from None
