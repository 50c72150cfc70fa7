"""Measurements of another program become a problem, by the name of their form: `problem_from` files, `problem_of`
texts."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from optpipe.errors import InputError, did_you_mean
from optpipe.measured import csv_file, megatron_timers, primus, torch_trace
from optpipe.measured.estimate import Given, Measurements, estimate, estimate_sums
from optpipe.measured.op_times import SHAPES
from optpipe.model.problem import read_file, read_text

MEASURED = ("torch-trace", "primus", "megatron-timers", "csv")


def problem_from(
    form: str,
    *paths: str | Path,
    activation_bytes: int | Sequence[int] | None = None,
    activation_budget_bytes: int | None = None,
    weight_share: float | None = None,
    microbatches: int | None = None,
    devices: int | None = None,
    chunks: int = 1,
    shape: str = "looped",
) -> Measurements:
    """Makes a problem of what another program has measured.

    Parameters
    ----------
    form
        `torch-trace`: Chrome traces of torch.profiler, one file a rank, in which PyTorch's pipelining ran.
        `primus`: the folder that AMD's Primus writes with `dump_pp_data`.
        `megatron-timers`: Megatron's log with `--timing-log-level 2 --timing-log-option all`.
        `csv`: a table with the columns stage, op, microbatch, and start_ms and end_ms, or duration_ms.
    paths
        The files; one, but for `torch-trace`.
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
        How chunks lie, looped or v, where the form does not say it (`primus`, `megatron-timers`).

    Returns
    -------
    Measurements
        The problem, the spreads, what is not known, and what ran.

    Raises
    ------
    InputError
        If there is no such form, a file cannot be read, or lacks an op that a problem needs.
    """
    given = Given(
        [activation_bytes] if isinstance(activation_bytes, int) else activation_bytes,
        activation_budget_bytes,
        weight_share,
    )
    run = Run(microbatches, devices, chunks, shape)
    _require(form, len(paths), given, run)
    files = [Path(path) for path in paths]
    if form == "primus":
        if not files[0].is_dir():
            raise InputError(f"{files[0]}: the folder that dump_pp_data writes is expected")
        files = sorted(files[0].glob("*.json"))
    return problem_of(form, [(str(path), _text(path)) for path in files], given, run)


class Run(NamedTuple):
    """What a form may not say of the run that was measured; see `problem_from`."""

    microbatches: int | None = None
    devices: int | None = None
    chunks: int = 1
    shape: str = "looped"


def problem_of(form: str, files: Sequence[tuple[str, str]], given: Given, run: Run) -> Measurements:
    """The same for texts with the names of their files; of `primus`, all files of the folder."""
    _require(form, 1 if form == "primus" else len(files), given, run)
    name, text = files[0] if files else ("", "")
    if form == "torch-trace":
        found, on_host = torch_trace.read(files)
        measured = estimate(found, given)
        host = ("times of a device: these are the host's",) if on_host else ()
        return replace(measured, unknown=(*host, *measured.unknown))
    if form == "primus":
        return estimate(primus.read(dict(files), run.shape), given)
    if form == "csv":
        return estimate(csv_file.read(text, name), given)
    if run.microbatches is None:
        raise InputError("microbatches is missing: Megatron's log does not say how many a step has")
    times, where = megatron_timers.read(text, name, run.microbatches, run.devices, run.chunks, run.shape)
    return estimate_sums(times, where, run.microbatches, given)


def _require(form: str, files: int, given: Given, run: Run) -> None:
    if form not in MEASURED:
        raise InputError(
            f"form = {form!r}: one of {', '.join(MEASURED)} is expected{did_you_mean(form, MEASURED, '; ')}"
        )
    if not files or (files > 1 and form != "torch-trace"):
        raise InputError(f"{files} files: {'some are' if form == 'torch-trace' else 'one is'} expected of {form}")
    if given.weight_share is not None and not 0 <= given.weight_share <= 1:
        raise InputError(f"weight_share = {given.weight_share:g}: a share from 0 to 1 is expected")
    if run.shape not in SHAPES:
        raise InputError(f"shape = {run.shape!r}: one of {', '.join(SHAPES)} is expected")


def _text(path: Path) -> str:
    """The text of a file, which may be packed by gzip."""
    if path.suffix != ".gz":
        return read_text(path)
    try:
        return gzip.decompress(read_file(path)).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: no text packed by gzip: {error}") from None
