"""The names of the solver's methods, for whoever checks a name before a solver starts. Imports nothing."""

from __future__ import annotations

HEURISTICS = ("naive", "zb-auto", "adaoffload")  # each fits wherever any schedule does; the most promising last
MILP = "milp"
ENGINES = ("cyclic", "lns", "cpsat", MILP)
ROBUST = "robust"  # an engine, too, which `auto` starts where op times vary
METHODS = ("auto", *HEURISTICS, *ENGINES)
