"""`problem_from`: files of another program's measurements become a problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optpipe.errors import InputError, did_you_mean
from optpipe.measured.estimate import Measurements, ProblemOptions, estimate
from optpipe.measured.readers import READERS
from optpipe.measured.recording import Recording, RunFacts, Sample
from optpipe.model.placement import SHAPES

NO_FACTS = RunFacts()


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
        How chunks lie, looped or v, where the form lacks it (`primus`, `straggler`, `megatron-timers`). Default: as the
        times of `primus` show, else looped.
    step
        The number of one step, of which the problem has each micro-batch's own times. Default: the last whole one for
        `straggler`; for other forms the medians of all steps.
    replica
        The number of a replica where several were measured. Default: the first.

    Returns
    -------
    Measurements
        The problem, the spreads, what is unknown, what was not used, and what ran.

    Raises
    ------
    InputError
        If there is no such form, a file cannot be read, or lacks an op that a problem needs.
    """
    if weight_share is not None and not 0 <= weight_share <= 1:
        raise InputError(f"weight_share = {weight_share:g}: a share from 0 to 1 is expected")
    sizes = [activation_bytes] if isinstance(activation_bytes, int) else activation_bytes
    options = ProblemOptions(sizes, activation_budget_bytes, weight_share, step, replica)
    files = [path for each in paths for path in ([each] if isinstance(each, (str, Path)) else each)]
    _, recording = recording_from(files, form, RunFacts(microbatches, devices, chunks, shape))
    return estimate(recording, options)


def recording_from(
    paths: Sequence[str | Path], form: str | None = None, facts: RunFacts = NO_FACTS
) -> tuple[str, Recording]:
    """The form of these files, and all that ran by them; arguments as of `problem_from`. Without a form it is as the
    files' names and their first events show.

    Raises InputError if no form is like the files, or as `problem_from` does.
    """
    files = [Path(path) for path in paths]
    if form is not None and form not in READERS:
        raise InputError(f"form = {form!r}: one of {', '.join(READERS)} is expected{did_you_mean(form, READERS, '; ')}")
    if not files:
        raise InputError(f"no file given: {form or 'a form'} needs at least one")
    if facts.shape not in (None, *SHAPES):
        raise InputError(f"shape = {facts.shape!r}: one of {', '.join(SHAPES)} is expected")
    forms: dict[str, Path] = {form: files[0]} if form else {}
    for path in files if not form else ():
        sample = Sample(path)
        recognized = next((name for name, reader in READERS.items() if reader.recognize(sample)), None)
        if recognized is None:
            raise InputError(
                f"{path}: like no form that is known: a timeline of StragglerAnalysis, a trace of torch.profiler or a "
                "log of Megatron's timers is expected; say which by --form"
            )
        forms.setdefault(recognized, path)
    if len(forms) > 1:
        (one, first), (other, second) = list(forms.items())[:2]
        raise InputError(f"{first} is of the form {one}, {second} of {other}: the files of one run are expected")
    (chosen,) = forms
    for name, value, default in zip(RunFacts._fields, facts, NO_FACTS, strict=True):
        if value != default and name not in READERS[chosen].takes:
            takers = [other for other, reader in READERS.items() if name in reader.takes]
            raise InputError(f"{name} = {value}: files of the form {chosen} have it; it is for {' and '.join(takers)}")
    return chosen, READERS[chosen].read(files, facts)
