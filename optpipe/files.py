"""Files and JSON of users: what cannot be read or written is one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from optpipe.errors import InputError


def read_file(path: str | Path) -> bytes:
    """The bytes of a file. Raises InputError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, a file is expected") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def read_text(path: str | Path) -> str:
    """The text of a file. Raises InputError if it cannot be read or is no text in UTF-8, with or without its mark."""
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no text in UTF-8: {error.reason} at byte {error.start}") from None


def parse_json(text: str | bytes, what: str) -> Any:
    """The content of a JSON text. Raises InputError, about `what`, if it is none, or too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(f"{what}: lists or objects are nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not JSON: no text in UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{what} is not JSON: {error}") from None
    except ValueError:  # Python reads no whole number of more than some thousand digits
        raise InputError(f"{what}: a whole number has too many digits") from None


def write_file(path: str | Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all. Raises InputError if it cannot be written."""
    final = Path(path).resolve()
    special = final.exists() and not final.is_file()  # a pipe or a terminal is written to, not replaced
    draft = final if special else final.with_name(f".{final.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        if not special:
            draft.replace(final)
    except OSError as error:
        if not special:
            draft.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
