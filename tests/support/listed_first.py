"""`optpipe_solver.first` without its search among rules, which may leave nothing to search for."""

from __future__ import annotations

from optpipe.evaluate.objective import NEVER
from optpipe_solver.portfolio import first_schedules, heuristic_runs

if __name__ == "__main__":
    heuristic_runs.HeuristicRuns.by_rules = lambda *_: NEVER
    first_schedules.main()
