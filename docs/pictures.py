"""Draws the README's pictures again: `make pictures`. PipeOffload and the solver's best, at the same memory and on one time axis."""

from pathlib import Path

from optpipe import Problem, Schedule, solve
from optpipe.show.svg import gantt

HERE = Path(__file__).parent
PROBLEM = Problem.load(HERE.parent / "examples" / "problems" / "fastlink-4x8.json")


def best(method: str, time_limit: float) -> Schedule:
    schedule = solve(PROBLEM, method=method, time_limit=time_limit).schedule
    assert schedule is not None
    return schedule


def main() -> None:
    before, after = best("po-f", 20), best("auto", 30)
    for name, title, schedule in (("before", "Before: PipeOffload", before), ("after", "After: OptPipe's schedule, same memory", after)):
        (HERE / "pictures" / f"{name}.svg").write_text(gantt(schedule, title, until_ms=before.makespan_ms))
        print(f"{name}: {schedule.makespan_ms:g} ms by {schedule.method}")


if __name__ == "__main__":
    main()
