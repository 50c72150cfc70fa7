"""The one place to tune the search: which engines run, in what order and for how long, and what everything may take.

Heuristics run first, in the solver's own process. Engines follow in the order of `AUTO`; each takes over the process
of one that has ended. `side_by_side` says how many run at a time; heuristics count as one of them. Whenever one ends,
the next run of `AUTO` starts, from the best schedule so far. A run lasts its share of the engines' time; what it does
not use is left to those after it. Runs that repeat fill what is left, each time with another seed. Where all shares
are more than the time, each is as much less. With one thread one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optpipe.model.problem import Problem
from optpipe_solver import methods
from optpipe_solver.schedule_facts import pays_whole


@dataclass(frozen=True)
class EngineRun:
    """One run of an engine in the table."""

    engine: str
    share: float = 1.0  # of the engines' time, summed over all that run side by side
    max_forwards: int | None = None  # a problem with more is not solved by this engine within a minute or so
    repeat: bool = False  # over and over until time is up
    least_s: float = 0.0  # where its share is less, it is left out


WINDOWS = 20_000  # forwards up to which CP-SAT on windows pays; at 32,768 none gains in a minute

AUTO = (
    EngineRun("dispatch", 0.06),  # rules of a list scheduler; the sooner, the better what the others start from
    EngineRun(methods.RELAX, 0.08),  # bounds by one device alone; mostly over soon, whatever it starts from
    EngineRun("anneal", 0.10),  # exchanges of ops, of many micro-batches at once
    EngineRun("cpsat", 0.09, max_forwards=64),  # the whole problem at once: proves what is small
    EngineRun("lns", 0.29, WINDOWS),  # windows; a run goes on with what the one before has learnt
    EngineRun("cpsat", 0.06, least_s=2.0),  # the whole problem if it is not too large, in another neighbourhood
    EngineRun(methods.MILP, 0.02, max_forwards=256, least_s=0.5),  # windows, a second each; what is small whole
    EngineRun("anneal", 0.12, repeat=True),  # from the best schedule of all
    EngineRun("lns", 0.15, WINDOWS, repeat=True),  # likewise
    EngineRun("dispatch", 0.03, repeat=True),  # rules that follow from what the others found
)
MILP_OPS = 60  # compute ops up to which the whole MILP is solved in `auto`

# The portfolio's time
PARALLEL = 2  # searches that run side by side
THREADS_PER_SEARCH = 4  # further threads for each further search beside them
HEURISTICS_SHARE, HEURISTICS_S = 0.1, 2.0  # of the time if engines follow, and at least, for what no engine knows
STILL_GAINING = 1.5  # heuristics that gained after t seconds go on until this times t
COUNTED_SHARE = 0.9  # of the engines' time is planned with one thread, so that counted work fits on a busy machine
COUNTED_TIMEOUT = 2.0  # with one thread the clock ends an engine after this times the seconds of its count
STOP_S = 0.3  # kept for stopping the engines and writing the last frames
ENGINE_END_S = 0.3  # kept of what an engine is allotted for its end; with no more left none is started
ENGINE_LEAST_S = 1.0  # an engine is allotted that much at least, if it is left
NO_LIMIT_S = 86_400.0  # the time limit of an engine that the portfolio stops
REMEDY_S = 1.0  # for a schedule of each change with which an infeasible problem would fit
POLL_S = 0.1  # between looks at memory and clocks
OPS_PER_S = 30_000  # compute ops that heuristics handle in a second, about half of what they do on a quiet machine

# The heuristic in the portfolio
HEURISTIC = "adaoffload"

# The first schedule of a request
FIRST_S = 2.0  # of processor time at most: for published schedules, and as much for those on other stages
THOROUGH_S = 0.1  # of time in which it also searches by rules, some 50 ms, and tries other stages
FIRST_LIST_S = 0.5  # that list scheduling may take for it

# Heuristics by themselves
GENERATE_OPS = 30_000  # compute ops handled, about half a second, before `generate` settles for the best so far
GENERATE_TRIES = 80  # likewise, of small schedules
DESCENT_FAILURES = 300  # rules tried in a row without any of them being better
VARIANTS = 10  # choices of one parameter of a published schedule, evenly spread

# Placements: shares of the time
FIRST_LOOK_SHARE = 0.06  # a heuristic on every placement
FIRST_LOOK_MOST = 0.5  # likewise of the stages as given, where the machine is busy
PARTITIONS_SHARE = 0.2  # better partitions, if there are layers
RULES_SHARE = 0.2  # searches in rules on all placements, in a search of `RULES_S` or more
ANNEALING_SHARE = 0.35  # of the best, from two schedules side by side
BEST_TWO_SHARE = 0.1  # everything there is, on the best two
LEAST_BOUND_SHARE = 0.1  # bounds of the placements that have the least ones
# Placements: the rest
CHUNKS = 4  # a device at most
RULES_S = 2.0  # a search that long may wait until the rules of `dispatch` are loaded, mostly less than a second
COMPILE_S = 10.0  # and one that long until they are compiled
RULES_ROUNDS = 3  # of the searches in rules, each on half of the placements before
RULES_OPS_PER_S = 6e6  # ops that these simulate in a second, as `by_rules` counts
PLACEMENT_S = 2.5  # in less an engine has hardly begun
PARTITION_POLICIES = 6  # of AdaOffload that judge a partition
PARTITION_MOVES = 240  # from one partition; of more a sample is tried

# The planner
MICROBATCH_SIZES = (1, 2, 4, 8)
LOOPED_CHUNKS = 24  # a device at most, where stages are looped; else `CHUNKS`
MOST_DEGREE = 4096  # of pipeline or data parallelism
PUBLISHED_SHARE = 0.35  # of the time: published schedules for every candidate whose bound allows it
LISTED_SHARE = 0.15  # of the time: list scheduling for those that are left
OFFLOAD_FRACTIONS = (1.0, 0.75, 0.5, 0.25)  # of Megatron's own offload
OFFLOADS = 8  # its settings that are tried for a candidate
PUBLISHED_SPEED = 10  # published schedules take this many times less than list scheduling
PLAN_TIE = 0.01  # so much longer is no reason for more context parallelism: no prediction is so sure
FORMULA_SPEED = 50  # a formula takes this many times less, with the estimate of other stages
SPARE_S = 2.0  # of the time, not given to searches: their processes start and end, and the answer is written
SOLVED = ((4, 0.3), (2, 0.7))  # rounds of searches: the number of candidates, and the share of what is left

# Bounds
MEMORY_BOUND_PASSES = 4_096  # of unequal micro-batches through stages; with more the bound by memory takes seconds
WEIGHT_STEPS = 40  # steps from none to all of the weight of memory, link and compute
MEASURES = 12  # dual feasible functions that are tried
MEASURE_STAGES = 256  # stages of a device up to which more than one function is tried
RAMP_MOMENTS = 25  # after the start, and before the end, at which `ramp_bound` looks
RAMP_PRICES = 32  # of a byte that are tried for each class of micro-batches
RELAX_HORIZONS = 0.4, 0.6, 0.8, 1.0, 1.2  # of a micro-batch's way there and back: how far ahead `relax` looks
RELIEF_STATES = 20_000  # of the search for the least memory, looked at for one stage; equal stages need a handful


def side_by_side(threads: int) -> int:
    """How many searches run at a time. Engines that can use several threads share what the others leave."""
    return min(threads, PARALLEL + max(0, threads - PARALLEL) // THREADS_PER_SEARCH)


def heuristics_share(problem: Problem, seconds: float) -> float:
    """The share of the time that heuristics have if engines follow: none, so that they give one schedule, where
    `dispatch` finds all that they do; else half of it at most."""
    return max(HEURISTICS_SHARE, min(0.5, HEURISTICS_S / seconds)) if pays_whole(problem) else 0.0


def engine_runs(method: str, problem: Problem, supports: Callable[[str], bool]) -> list[EngineRun]:
    """Return the engine runs of a method in the order in which they start; none for a heuristic.

    `supports` says whether an engine can work on the problem.
    """
    if method in methods.ENGINES:
        return [EngineRun(method)] if supports(method) else []
    if method != "auto":
        return []
    forwards = sum(len(problem.route(j)) for j in range(problem.microbatches))
    small_enough = [run for run in AUTO if run.max_forwards is None or forwards <= run.max_forwards]
    runs = [run for run in small_enough if supports(run.engine)]
    total = sum(run.share for run in runs)
    fills_the_time = any(run.repeat for run in runs) and total <= 1
    return runs if fills_the_time else [replace(run, share=run.share / total) for run in runs]
