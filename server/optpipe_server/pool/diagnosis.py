"""The task of `/v1/diagnose`: a trace is read and diagnosed as `optpipe diagnose` does."""

from __future__ import annotations

import json
import resource
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from optpipe.diagnose import diagnose
from optpipe.diagnose.page import document, picture
from optpipe.diagnose.report import MOST_HELD
from optpipe.errors import InputError
from optpipe.measured.convert import recording_from
from optpipe.measured.readers import RunFacts
from optpipe.model.records import Record

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


def diagnosed(folder: Path, asked: DiagnoseOptions, threads: int, memory_mib: int | None) -> str:
    """Return the diagnosis of the file `upload` in the folder: a trace, or a tar archive of several.

    Searches take so many threads and so much memory. Raises `InputError` for what cannot be read.
    """
    run = RunFacts(asked.microbatches, asked.devices, asked.chunks, asked.shape)
    with chdir(folder):  # sentences name files without it
        with limited_memory(READING):
            read = recording_from(_unpacked(asked.name), asked.form, run)
        with limited_memory(None):  # searches, which are processes of their own, reserve more than they use
            diagnosis = diagnose(
                *read,
                stack=asked.stack,
                layers=asked.layers,
                memory=asked.memory,
                weight_share=asked.weight_share,
                time_limit_s=asked.time_limit_s,
                limits={"threads": threads, "memory_mib": memory_mib},
            )
    if asked.to == "html":
        return picture(diagnosis).html
    content = diagnosis.to_dict() if asked.to == "json" else document(diagnosis)
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _unpacked(name: str) -> list[Path]:
    """The file by its name, or those of an archive."""
    FILES.mkdir()
    try:
        is_archive = tarfile.is_tarfile(UPLOAD)
    except (OSError, EOFError, zlib.error):  # packed, and cut off
        is_archive = False
    if not is_archive:
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


@contextmanager
def limited_memory(size: int | None) -> Iterator[None]:
    """Let what is done here take `size` bytes more, or any number. Raises `InputError` if that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (hard if size is None else held + size, hard))
    try:
        yield
    except MemoryError:
        raise InputError(f"reading it takes more than {size} bytes; `optpipe diagnose FILE` has no limit") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
