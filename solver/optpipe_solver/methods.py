"""The names of the solver's methods, for whoever checks a name before a solver starts. Imports nothing."""

from __future__ import annotations

HEURISTICS = ("naive", "zb-auto", "adaoffload")
WITHIN_MEMORY = (
    "adaoffload",
    "zb-auto",
    "naive",
)  # those that fit wherever any schedule does, the most promising first
ENGINES = ("cyclic", "lns", "cpsat", "milp")
ON_CPSAT = ("cyclic", "lns", "cpsat")  # engines that need ortools; where it is missing, the MILP solves windows, too
ROBUST = "robust"  # an engine, too, which `auto` starts where op times vary
METHODS = ("auto", *HEURISTICS, *ENGINES)
