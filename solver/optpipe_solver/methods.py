"""The names of the solver's methods, for whoever checks a name before a solver starts."""

from __future__ import annotations

from optpipe.options import ENGINES, MILP

HEURISTICS = ("naive", "zb-auto", "adaoffload")  # each fits wherever any schedule does; the most promising last
ROBUST = "robust"  # an engine, too, which `auto` starts where op times vary
RELAX = "relax"  # an engine that only proves bounds, which `auto` starts
METHODS = ("auto", *HEURISTICS, *ENGINES)

__all__ = ["ENGINES", "HEURISTICS", "METHODS", "MILP", "RELAX", "ROBUST"]
