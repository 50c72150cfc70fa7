"""`python -m optpipe_server.own_process diagnose`: diagnoses a trace for one request of the service.

It reads the request and writes the answer, or `{"refused": "..."}`. A diagnosis is of the file `upload` in
its folder: a trace, or a tar archive of several. It has a lower priority than the service and ends with it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from optpipe.diagnose import diagnose_recording
from optpipe.diagnose.page import document, picture
from optpipe.diagnose.report import MOST_HELD
from optpipe.errors import InputError
from optpipe.measured.convert import recording_from
from optpipe.measured.readers import RunFacts
from optpipe.model.records import Record
from optpipe.process.niceness import NICER, group_as_nice
from optpipe.process.protocol import read_one

UPLOAD, FILES = Path("upload"), Path("files")
MOST_FILES = 1024
LARGEST = 2**30  # bytes of what is in an archive
READING = 2**31  # bytes that reading may take


class DiagnoseOptions(Record):
    """What `POST /v1/diagnose` is asked beside the files, as `optpipe diagnose` is. `name` is the file's, `layers`
    those of all stages or of each, `to` the form of the reply: the figures, the page, or what the page draws."""

    name: Annotated[str, Field(max_length=200)] = "trace"
    to: Literal["json", "html", "figure"] = "json"
    form: str | None = None
    stack: str | None = None
    layers: list[int] = Field([], max_length=4096)
    memory: Annotated[float, Field(ge=1, le=MOST_HELD)] | None = None
    weight_share: Annotated[float, Field(ge=0, le=1)] | None = None
    time_limit_s: Annotated[float, Field(ge=0, le=60)] = 10.0
    microbatches: Annotated[int, Field(ge=1, le=65536)] | None = None
    devices: Annotated[int, Field(ge=1, le=4096)] | None = None
    chunks: Annotated[int, Field(ge=1, le=4096)] = 1
    shape: Literal["looped", "v"] | None = None


class DiagnoseRequest(DiagnoseOptions):
    """The same, and what a search may take."""

    threads: int
    memory_mib: int | None = None


def main() -> None:
    request = read_one(DiagnoseRequest)
    os.nice(NICER)
    group_as_nice(os.getpid())
    try:
        print(diagnosed(request))
    except InputError as error:
        print(as_json({"refused": str(error)}))


def as_json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def diagnosed(asked: DiagnoseRequest) -> str:
    run = RunFacts(asked.microbatches, asked.devices, asked.chunks, asked.shape)
    with limited_memory():
        form, recording = recording_from(_unpacked(asked.name), asked.form, run)
    diagnosis = diagnose_recording(
        recording,
        form,
        asked.stack,
        asked.layers,
        asked.memory,
        asked.weight_share,
        asked.time_limit_s,
        limits={"threads": asked.threads, "memory_mib": asked.memory_mib},
    )
    if asked.to == "html":
        return picture(diagnosis).html
    return as_json(diagnosis.to_dict() if asked.to == "json" else document(diagnosis))


def _unpacked(name: str) -> list[Path]:
    """The file by its name, or those of an archive."""
    FILES.mkdir()
    if not _is_archive():
        return [UPLOAD.rename(FILES / (Path(name).name.replace("\0", "") or "trace"))]
    size = 0
    try:
        with tarfile.open(UPLOAD) as archive:
            for count, member in enumerate(each for each in archive if each.isfile()):
                size += member.size
                if count >= MOST_FILES or size > LARGEST:
                    raise InputError(f"the archive has more than {MOST_FILES} files or {LARGEST} bytes")
                path = FILES.joinpath(*(part for part in Path(member.name).parts if part not in ("/", "..")))
                if path.exists():
                    raise InputError(f"{path}: two files of the archive have this name")
                path.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                with path.open("xb") as file:
                    shutil.copyfileobj(content, file)  # type: ignore[arg-type]  # a file has content
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"the archive cannot be read: {error}") from None
    return sorted(path for path in FILES.rglob("*") if path.is_file() and not path.name.startswith("."))


def _is_archive() -> bool:
    try:
        return tarfile.is_tarfile(UPLOAD)
    except (OSError, EOFError, zlib.error):  # packed, and cut off
        return False


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let what is done here take `READING` bytes more; searches, which reserve more than they use, come later."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + READING, hard))
    try:
        yield
    except MemoryError:
        raise InputError(f"reading it takes more than {READING} bytes; `optpipe diagnose FILE` has no limit") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
