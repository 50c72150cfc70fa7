"""The search for one request: heuristics and engines by a plan, over one placement or many.

`Portfolio` searches the problem's own stages, `PlacementSearch` all placements. What is tuned is in `tuning`.
"""

from __future__ import annotations

from optpipe_solver.portfolio.placement_search import PlacementSearch
from optpipe_solver.portfolio.portfolio import Portfolio
from optpipe_solver.portfolio.remedies import offer_remedies

__all__ = ["PlacementSearch", "Portfolio", "offer_remedies"]
