import pytest
from support.commands import Run, run
from support.problems import pipeline, stage

from optpipe import Problem

__all__ = ["run"]  # a fixture


@pytest.fixture
def scripted(run: Run, scripted_solver: None) -> Run:
    """As `run`; searches ask a scripted solver."""
    return run


@pytest.fixture
def small(scripted: Run) -> Problem:
    """A problem that the scripted solver solves, also in the file `p.json`."""
    problem = pipeline(2, 3, 10, stage(sizes=(1, 1)), name="small")
    problem.save("p.json")
    return problem
