"""The pack: solved schedules of common problems, in one file that a release carries.

A zip file has one member for each structure and objective, compressed by itself. Its lines are rows as JSON: what finds
an entry, then the entry as it is exported. A member is read when its structure is first asked for; times are computed
again, and schedules checked, by whoever finds them. `make pack` writes it.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from optpipe_cache.storage import StoredRow

log = logging.getLogger("optpipe.cache")

PATH = Path(__file__).with_name("pack.zip")
BEGINNING_OF_ZIP = (1980, 1, 1, 0, 0, 0)  # the same rows make the same file


class _Row(NamedTuple):
    problem_sha256: str
    features: bytes
    entry: str


class Pack:
    """An `optpipe_cache.Source` that is only read, for all threads. A damaged file is reported and has no entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._members: dict[str, dict[str, _Row]] = {}  # what was read, by the problems' hashes

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        """Return an entry that `similar` has found."""
        with self._lock:
            members = [rows for name, rows in self._members.items() if name.endswith(f"/{objective}")]
        return next((rows[problem_sha256].entry for rows in members if problem_sha256 in rows), None)

    def similar(self, structure: str, objective: str, most: int) -> Sequence[tuple[str, bytes]]:
        rows = self._member(f"{structure}/{objective}").values()
        return [(row.problem_sha256, row.features) for row in islice(rows, most)]

    def _member(self, name: str) -> dict[str, _Row]:
        with self._lock:
            if name not in self._members:
                self._members[name] = self._read(name)
            return self._members[name]

    def _read(self, name: str) -> dict[str, _Row]:
        try:
            with zipfile.ZipFile(self.path) as pack:
                lines = pack.read(name).decode().splitlines() if name in pack.namelist() else []
            rows = (json.loads(line) for line in lines)
            return {sha256: _Row(sha256, bytes.fromhex(packed), entry) for sha256, packed, entry in rows}
        except Exception as error:  # a damaged file, or a Python that cannot unpack it, ends no lookup
            log.warning("%s: the pack cannot be read: %s", self.path, error)
            return {}


def write_pack(path: Path, rows: Iterable[StoredRow]) -> None:
    """Write the rows as a pack."""
    members = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.problem_sha256):
        line = json.dumps([row.problem_sha256, row.features.hex(), row.entry])
        members[f"{row.structure}/{row.objective}"].append(f"{line}\n")
    with zipfile.ZipFile(path, "w") as pack:
        for name, lines in sorted(members.items()):
            member = zipfile.ZipInfo(name, BEGINNING_OF_ZIP)
            member.compress_type = zipfile.ZIP_LZMA
            pack.writestr(member, "".join(lines))


@cache
def release_pack() -> Pack:
    """The release's pack. Nothing is read yet."""
    return Pack(PATH)
