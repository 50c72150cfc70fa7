"""What every reader of measurements has, and what of its files helps to recognize its form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from optpipe.errors import InputError
from optpipe.measured.events import Events, read_pieces
from optpipe.measured.recording import Recording

BEGINNING = 8  # pieces of a file by which a form is recognized: MB, of ASCII


class RunFacts(NamedTuple):
    """What a form may not say of the run that was measured.

    Attributes
    ----------
    microbatches
        Micro-batches a step, which megatron-timers do not say.
    devices
        Devices of the pipeline in megatron-timers. Default: all ranks.
    chunks
        Stages a device in megatron-timers.
    shape
        How the stages of a device are placed: looped or v. Default: as the times of primus tell.
    """

    microbatches: int | None = None
    devices: int | None = None
    chunks: int = 1
    shape: str | None = None


class Sample:
    """A file, or a folder with the first trace in it, for a reader to recognize."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = {each.name for each in path.iterdir()} if path.is_dir() else {path.name}
        self.file = traces_in(path)[0] if path.is_dir() else path

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The first events, if it is a Chrome trace."""
        events = list[dict[str, Any]]()
        with suppress(InputError):  # of another form, or cut where the beginning ends
            for event in Events(islice(read_pieces(self.file), BEGINNING), str(self.file)):
                events.append(event)
        return events


class Reader(Protocol):
    """Reads one form of measurements.

    Attributes
    ----------
    name
        Of the form, as `problem_from` names it.
    """

    name: str

    def recognize(self, sample: Sample) -> bool:
        """Whether this file, or folder, is of the form."""

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        """All that ran by these files of one run. Raises InputError that names the file, and what is wrong with it."""


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder; if there is none, those in its folders, as `record_trace` leaves them. Raises InputError
    if there are none."""
    for inside in (folder.iterdir(), (file for each in folder.iterdir() if each.is_dir() for file in each.iterdir())):
        if traces := sorted(each for each in inside if each.is_file() and each.name.endswith((".json", ".json.gz"))):
            return traces
    raise InputError(f"{folder}: no traces in this folder: files named .json or .json.gz are expected")


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The paths. Raises InputError if one is a folder or is there twice."""
    seen = dict[Path, Path]()
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path}: is a folder, a file is expected")
        if path.resolve() in seen:
            raise InputError(f"{path}: is given twice: each file once is expected")
        seen[path.resolve()] = path
    return list(seen.values())
