"""The names of the solver's methods, for whoever checks a name before a solver starts."""

from __future__ import annotations

from optpipe.options import ENGINES, MILP, RELAX

HEURISTICS = ("naive", "adaoffload")  # each fits wherever any schedule does; the most promising last
METHODS = ("auto", *HEURISTICS, *ENGINES)

__all__ = ["ENGINES", "HEURISTICS", "METHODS", "MILP", "RELAX"]
