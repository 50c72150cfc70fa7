"""Where work is counted, the clock of a busy machine ends nothing."""

from collections.abc import Iterator

import ortools.sat.python.cp_model  # noqa: F401 OR-Tools is loaded before a test of the MILP loads HiGHS, not after it
import pytest
from support.oracles.milp import Solver, solver_process

from optpipe.dispatch import simulate
from optpipe_solver import tuning


@pytest.fixture(scope="session", autouse=True)
def _work_is_counted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "COUNTED_TIMEOUT", 1000.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _heuristics_use_compiled_loops(_compiled: None) -> Iterator[None]:
    """What they find is the same (`test_dispatch`), with a tenth of the processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "plain", lambda loop: loop)
        yield


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    """The MILP in a process of its own."""
    with solver_process() as running:
        yield running


@pytest.fixture(scope="module")
def few_choices() -> Iterator[None]:
    """The planner's micro-batches have one or two sequences, and devices two chunks at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "MICROBATCH_SIZES", (1, 2))
        patch.setattr(tuning, "CHUNKS", 2)
        patch.setattr(tuning, "LOOPED_CHUNKS", 2)
        yield
