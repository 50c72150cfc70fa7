"""`optpipe_solver.first` without its search among rules, which may leave nothing to search for."""

from __future__ import annotations

from optpipe_solver.portfolio import first_schedules, heuristic_runs

if __name__ == "__main__":
    heuristic_runs.RulesSearch.go_on = lambda *_: None
    first_schedules.main()
