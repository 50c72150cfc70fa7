"""The names of the solver's methods, for whoever checks a name before a solver starts. Imports nothing."""

from __future__ import annotations

HEURISTICS = ("naive", "gpipe", "1f1b", "zb", "adaoffload")  # cheap and certain first
ENGINES = ("cyclic", "milp")
METHODS = ("auto", *HEURISTICS, *ENGINES)
