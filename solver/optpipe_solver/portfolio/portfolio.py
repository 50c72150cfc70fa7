"""`Portfolio`: the search for one request, an algorithm portfolio (Gomes and Selman 2001).

Heuristics run in this process, engines in processes of their own, as `tuning` has it. The best schedule and the best
bound of all of them are kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from optpipe.errors import OptPipeError
from optpipe.process.protocol import Infeasible, Note, Request
from optpipe.reuse.repair import repair
from optpipe_solver import engines, methods, tuning
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.parts import in_all_parts
from optpipe_solver.portfolio.engine_runs import EngineRuns
from optpipe_solver.portfolio.heuristic_runs import HeuristicRuns
from optpipe_solver.portfolio.other_stages import shorter_on_other_stages
from optpipe_solver.portfolio.search_state import Emit, SearchState
from optpipe_solver.portfolio.time_limit import TimeLimit
from optpipe_solver.systems import in_best_order
from optpipe_solver.systems.variants import is_system


class Portfolio:
    """One request's search on the problem's own stages.

    Parameters
    ----------
    request
        The problem, the method and the limits.
    emit
        Called with each better schedule, each better bound, and what else there is to say, as soon as it is known.

    Raises
    ------
    InputError
        If the method is unknown or does not apply to this problem.
    """

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit = request, emit
        system = (
            in_best_order(request.method, request.problem, "keep", request.objective)
            if is_system(request.method)
            else None
        )
        self.limit = TimeLimit(request)
        self.state = SearchState(request, emit)
        self.heuristics = HeuristicRuns(request, system, self.state, self.limit, emit)

    def run(self) -> None:
        """Run heuristics and engines side by side until time is up, nothing is left to try or the best is proven.

        Which engines run, in what order and why is `tuning.AUTO`. The MILP, asked for by name, runs whatever heuristics
        have found.
        """
        if not self.begin():  # bounds and the warm start; or there is no schedule at all
            return
        state = self.state
        runs = self._engine_runs()
        heuristics = self._heuristics_beside(runs)
        heuristics_run = not state.proven
        try:
            while True:
                if heuristics_run:  # one schedule of one of them, in this process; the first one in any case
                    heuristics_run = next(heuristics, "ended") is None and not state.proven
                if self._is_over(runs):
                    break
                if state.best or not heuristics_run:  # engines start from a schedule, if there is any
                    runs.start_next(beside_heuristics=heuristics_run)
                if not (heuristics_run or runs.running):
                    break
                runs.handle_messages(0.0 if heuristics_run else min(tuning.POLL_S, max(0.0, self.limit.left_s)))
                runs.limit_memory()
        finally:
            runs.stop_all()

    def _is_over(self, runs: EngineRuns) -> bool:
        is_done = self.state.proven and not runs.unfinished(methods.MILP)
        return is_done or self.limit.left_s <= 0

    def _engine_runs(self) -> EngineRuns:
        """The engines of the method, none of them started."""
        request = self.request
        planned = tuning.engine_runs(request.method, request.problem, self.supports)
        if request.method == methods.MILP and planned:
            self.emit(Note(text="milp: none of its searches had begun", method=methods.MILP, ongoing=True))
        if any(engines.waits_for_compiler(run.engine) for run in planned):
            self.emit(Note(text=engines.COMPILING))
        return EngineRuns(request, planned, self.state, self.limit, self.emit)

    def _heuristics_beside(self, runs: EngineRuns) -> Iterator[None]:
        """Heuristics and published schedules; without engines they have all the time."""
        share = tuning.heuristics_share(self.limit.seconds) if runs.are_planned else 1.0
        return self.heuristics.run(self.heuristics.streams(), share, lambda: runs.loading)

    def tell_of_other_stages(self) -> None:
        """Emit a note if a published schedule on other stages is shorter than the answer, where time is left."""
        asked, state = self.request, self.state
        if state.best is None or asked.method not in ("auto", *methods.ENGINES):
            return
        until = self.limit.until(tuning.OTHER_STAGES_S)
        if text := shorter_on_other_stages(asked.problem, asked.objective, state.best_ms, until):
            self.emit(Note(text=text))

    def begin(self) -> bool:
        """Emit what needs no search: that the problem is infeasible, or bounds and the warm start.

        Returns
        -------
        Whether any schedule exists.
        """
        problem, objective = self.request.problem, self.request.objective
        if reason := infeasibility(problem):
            self.emit(Infeasible(reason=reason))
            return False
        self.state.raise_bound(trivial_bound(problem, objective), "trivial")
        self._take_warm_start()
        self.state.raise_bound(memory_bound(problem, objective), "memory")
        return True

    def _take_warm_start(self) -> None:
        """Offer the warm start, re-timed with today's costs; in more parts or repaired if it does not hold for them.

        Its stages are taken for those of the problem, whatever placement it names.
        """
        if self.request.warm_start is None:
            return
        problem, programs = self.request.problem, self.request.warm_start.model_copy(update={"placement": None})
        wrong: str | None
        try:
            given = programs.schedule(problem, programs.method or "warm start")
            wrong = self.state.offer(given)
            if wrong and (divided := in_all_parts(given)) is not None:
                wrong = self.state.offer(divided)
            if wrong and (repaired := repair(problem, given)) is not None:
                wrong = self.state.offer(repaired)
        except OptPipeError as error:
            wrong = str(error)
        if wrong:
            self.emit(Note(text=f"the warm start is no schedule of this problem: {wrong}"))

    def supports(self, engine: str) -> bool:
        """Whether an engine can work on the problem.

        Emits a note if it was asked for by name and cannot, or if the problem allows what no engine makes.
        """
        problem = self.request.problem
        reason = engines.load(engine).unsupported(problem)
        if engine == self.request.method:
            allowed = {"pairs": problem.overlap_factor is not None, "evictions": problem.costs.can_evict.any()}
            never = " and no ".join(what for what, is_allowed in allowed.items() if is_allowed)
            if reason:
                self.emit(Note(text=f"{engine} does not apply: {reason}"))
            elif never:
                self.emit(Note(text=f"{engine} makes no {never}: some heuristics and published schedules do"))
        return reason is None
