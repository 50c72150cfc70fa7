"""The practical steps of section 4.1, each of which can be left out, so that what it is worth can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["none", "entry", "stages"]


@dataclass(frozen=True)
class Switches:
    """The default is all on, as the solver uses them; `PLAIN` is the program of Appendix C as it stands. None changes
    the optimum but `order`, where activations can leave (see `model`)."""

    order: Order = "stages"
    """Eq. 1: micro-batches in any order, or in the order of their numbers where they enter the pipeline (which loses
    nothing), or in that order in all stages."""
    one_per_pair: bool = True
    """Eq. 1, second line: one variable a pair, the other order being its negation; else two whose sum is one."""
    determined: bool = True
    """Figure 3: no variable where an order follows from others, or where nothing else fits into the horizon."""
    triangles: Literal["none", "compute", "all"] = "compute"
    """Section 4.1.2: no cycle of three; of compute ops (P), or of all that have an order (K, L, M, N, H, too)."""
    warm_start: bool = True
    """Section 4.1.3: start from the schedule that is known, and cut off longer ones."""
    tight: bool = True
    """Each row's big-M as small as the variables' bounds allow, instead of one constant for all."""
    workload: bool = True
    """Not of the paper: an op waits for all work of its device that precedes it, and no schedule beats the trivial
    bound."""


ALL = Switches()
PLAIN = Switches(
    "none", one_per_pair=False, determined=False, triangles="none", warm_start=False, tight=False, workload=False
)
