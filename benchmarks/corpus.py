"""A folder of public traces: what each job loses, why, the best cure, and how much is proven avoidable at most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_file import Results, ResultsPath
from benchmarks.tables import head, line
from optpipe.diagnose import Diagnosis, diagnose
from optpipe.errors import InputError
from optpipe.measured.convert import recording_from
from optpipe.options import SearchOptions

COLUMNS = ("trace", "steps", "replicas", "a step: ms", "replayed within", "cause, of a step", "best cure", "at most")


def corpus(folder: Path | None = None, /, *, results: ResultsPath = None) -> None:
    """Diagnose each trace of a folder, without a search whose answer depends on the machine.

    Parameters
    ----------
    folder
        Folder of traces: files, and folders of ranks. Default: print the results again.
    """
    traces = sorted(_traces(folder)) if folder else []
    if folder and not traces:
        raise InputError(f"{folder}: no traces: files named .json, .json.gz or .csv, or folders of them, are expected")
    kept = Results(results, "corpus", ("trace",), SearchOptions(placements="keep"))
    for path in traces:
        name = path.name.partition(".")[0].removeprefix("timeline-")
        if not kept.find(name):
            kept.add({"trace": name} | _row(diagnose(*recording_from([path]), time_limit_s=0.0)))
    print(head(COLUMNS, "lrrrrllr"))
    for row in kept.rows:
        print(line(_cells(row)))


def _traces(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith((".json", ".json.gz", ".csv")) or (path.is_dir() and any(path.iterdir())):
            yield path


def _row(diagnosis: Diagnosis) -> dict[str, Any]:
    losses, cures = diagnosis.losses, diagnosis.cures.cures
    return {
        "steps": len(diagnosis.runs.steps),
        "replicas": len(diagnosis.runs.replicas),
        "step_ms": round(float(losses.measured_ms.mean()), 1),
        "replay_error": round(losses.replay_error, 6),
        "causes": diagnosis.causes,
        "cure": cures[0].title if cures else None,
        "gain": round(cures[0].gain, 4) if cures else 0.0,
        "most": round(max((cure.most for cure in cures), default=0.0), 4),
    }


def _cells(row: dict[str, Any]) -> Iterator[object]:
    yield from (row["trace"], row["steps"], row["replicas"], f"{row['step_ms']:.0f}", f"{row['replay_error']:.2%}")
    yield "; ".join(row["causes"]) or "none"
    yield f"{row['cure']}: {row['gain']:.1%} less" if row["cure"] else "none"
    yield f"{row['most']:.1%} less"
