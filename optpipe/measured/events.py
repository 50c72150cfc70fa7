"""Files of measurements in a stream: their texts piece by piece, packed or not, and the events of a Chrome trace one by
one, so that a file of hundreds of MB needs the memory of what is used of it."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from optpipe.errors import InputError

GZIP = b"\x1f\x8b"  # what every file packed by gzip begins with
PIECE = 2**20  # characters
LARGEST = 2**26  # of one value beside the events, or of one event
_BETWEEN = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"[-+.eE\d]*")  # what may follow in a number that is cut


def read_pieces(path: str | Path) -> Iterator[str]:
    """Yields the text of a file, which may be packed by gzip, whatever its name is.

    Raises InputError if it cannot be read or is no text in UTF-8.
    """
    packed = False
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            content = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
            text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
            while piece := text.read(PIECE):
                yield piece
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, a file is expected") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        if packed:
            raise InputError(f"{path}: is not valid gzip: {error}") from None
        if isinstance(error, UnicodeDecodeError):
            raise InputError(f"{path}: no text in UTF-8: {error.reason}") from None
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


class Events:
    """The events of a Chrome trace: of a list, or of an object's `traceEvents`. To be iterated once; the attributes are
    complete after the last event. Iterating raises InputError if the text is not JSON."""

    def __init__(self, pieces: Iterable[str], path: str) -> None:
        self._pieces, self._path = iter(pieces), path
        self._text, self._at, self._before = "", 0, 0
        self._decode = json.JSONDecoder().raw_decode
        self.rest: dict[str, Any] = {}  # what else the object has
        self.listed = False  # whether there is a list of events
        self.others = 0  # entries of the list that are no objects, and left out

    def __iter__(self) -> Iterator[dict[str, Any]]:
        opening = self._next()
        if opening == "[":
            yield from self._events()
        elif opening == "{":
            for _ in self._items("}"):
                name = self._value()
                self._take(":")
                if name == "traceEvents" and self._next() == "[":
                    yield from self._events()
                else:
                    self.rest[str(name)] = self._value()
        else:
            self._value()
        if self._next():
            self._wrong("Extra data")

    def _events(self) -> Iterator[dict[str, Any]]:
        self.listed = True
        for _ in self._items("]"):
            event = self._value()
            if isinstance(event, dict):
                yield event
            else:
                self.others += 1

    def _items(self, closing: str) -> Iterator[None]:
        """Yields where an item of a list or of an object begins; whoever iterates reads it."""
        self._at += 1
        if self._next() != closing:
            yield
            while self._next() != closing:
                self._take(",")
                yield
        self._at += 1

    def _next(self) -> str:
        """The next character that is not white, which stays; none at the end."""
        while True:
            self._at = cast(re.Match[str], _BETWEEN.match(self._text, self._at)).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(1):
                return ""

    def _take(self, expected: str) -> None:
        if self._next() != expected:
            self._wrong(f"Expecting {expected!r}")
        self._at += 1

    def _value(self) -> Any:
        """The next value; a text that breaks off in it is read on."""
        self._next()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                number_end = cast(re.Match[str], _NUMBER.match(self._text, end)).end()
                may_go_on = not isinstance(value, (dict, list, str)) and number_end == len(self._text)
                if not may_go_on or not self._more(1):
                    self._at = end
                    return value
            except RecursionError:
                raise InputError(f"{self._path}: lists or objects are nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > LARGEST or not self._more(len(self._text) - self._at):
                    self._at = min(error.pos, len(self._text))
                    self._wrong(error.msg)
            except ValueError:  # Python reads no whole number of more than some thousand digits
                raise InputError(f"{self._path}: a whole number has too many digits") from None

    def _more(self, least: int) -> bool:
        """Read at least so many characters more, if there are some."""
        pieces, length = [self._text[self._at :]], 0
        self._before += self._at
        self._at = 0
        while length < least and (piece := next(self._pieces, "")):
            pieces.append(piece)
            length += len(piece)
        self._text = "".join(pieces)
        return length > 0

    def _wrong(self, what: str) -> None:
        raise InputError(f"{self._path} is not JSON: {what} (char {self._before + self._at})")
