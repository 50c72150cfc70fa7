"""What commands are asked with: records of options, paths that are checked first, and the extras that they need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter, Token
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from optpipe.errors import InputError

ProblemPath = Annotated[Path, Parameter(help="A problem file.")]
SchedulePath = Annotated[Path, Parameter(help="A schedule file.")]
Flag = Annotated[bool, Parameter(negative="")]  # one that is only switched on
Json = Annotated[Flag, Parameter(help="Print JSON instead of text.")]
NoCache = Annotated[Flag, Parameter(help="Neither look schedules up nor store them.")]

Record = TypeVar("Record", bound=BaseModel)


class _FromWords:
    """Metadata of a record that is read from words, as a shell has them."""

    def __get_pydantic_core_schema__(self, record: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(partial(read, record))


Options = Annotated[Record, Parameter(name="*"), _FromWords()]


def read(record: type[Record], words: dict[str, Any]) -> Record:
    """The record with these fields: each is a word, several words, or of a flag True or False. Raises pydantic's
    `ValidationError`."""
    texts = {name: ",".join(word) if isinstance(word, list) else str(word) for name, word in words.items()}
    return record.model_validate_strings(texts)


def _numbers(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in tokens[0].value.split(","))
    except ValueError:
        raise ValueError(f"{tokens[0].value!r}: one number, or several with commas between, were expected") from None


Numbers = Annotated[tuple[int, ...], Parameter(converter=_numbers, n_tokens=1, accepts_keys=False, metavar="N[,N...]")]


def require_writable(_: Any, path: Path | None) -> None:
    """Raise `InputError` if the file cannot be written, before a long search whose answer would be lost."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: is a folder, a file was expected")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def require_folder(_: Any, folder: Path | None) -> None:
    """Create the folder if there is none, before a long search. Raise `InputError` if that fails."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}") from None


NewFile = Annotated[Path | None, Parameter(validator=require_writable)]
NewFolder = Annotated[Path | None, Parameter(validator=require_folder)]
Output = Annotated[NewFile, Parameter(name=("--output", "-o"), help="The file to write.")]
FolderOutput = Annotated[NewFolder, Parameter(name=("--output", "-o"), help="The folder for files to write.")]


CLIENT = ("httpx", "httpx_sse", "tenacity")
NEEDS = {
    "client": CLIENT,
    "runtime": ("torch", *CLIENT),
    "server": ("fastapi", "prometheus_client", "sqlalchemy", "structlog", "uvicorn"),
}
WITHOUT_CUDA = " (with CUDA, 5 GB; without: first torch from an index of torch for CPUs, as docs/start.md says)"


def need(extra: str, *packages: str) -> None:
    """Raise `InputError` if the packages of this extra, or those of it that are named, are not installed."""
    missing = [name for name in packages or NEEDS[extra] if find_spec(name) is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install 'optpipe[{extra}]'"
            f"{WITHOUT_CUDA if 'torch' in missing else ''}"
        )
