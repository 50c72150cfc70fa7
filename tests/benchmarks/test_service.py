"""The benchmark of the service measures correctly; its times are for quiet machines."""

import asyncio

import pytest
from support.service.postgres import Postgres

from benchmarks.service.command import Figure, measure


@pytest.mark.parametrize(
    ("kind", "seconds", "rate", "clients", "reconnects", "each"),
    [
        ("sqlite", 1.0, 5.0, 20, 5, 1),
        pytest.param("sqlite", 20.0, 50.0, 500, 100, 5, marks=pytest.mark.soak),
        pytest.param("postgresql", 20.0, 50.0, 500, 100, 5, marks=pytest.mark.soak),  # waits for a lease to end
    ],
)
def test_figures_that_do_not_depend_on_the_machine_hold(
    kind: str, seconds: float, rate: float, clients: int, reconnects: int, each: int, postgres: Postgres
) -> None:
    """Nothing is lost or received twice, and all replies are right."""
    if kind == "sqlite":
        figures = asyncio.run(measure(None, rate, seconds, clients, reconnects, each))
    else:
        with postgres.database() as url:
            figures = asyncio.run(measure(url, rate, seconds, clients, reconnects, each))
    counts = [figure for figure in figures if figure.target == 0]
    assert len(counts) == 4
    timed = [figure for figure in counts if "without a schedule" in figure.what]  # within the service's limit of 10 s
    assert len(timed) == 1
    assert [figure for figure in counts if not figure.held and figure not in timed] == []
    assert any(f"by clients cut off {reconnects} times" in figure.what for figure in figures)
    slow = [figure for figure in figures if figure.unit == "s"]
    assert len(slow) == 5
    if seconds >= 20:  # the short run may have to share the machine
        assert [figure for figure in (*timed, *slow) if not figure.held] == []


def test_a_figure_holds_up_to_its_target() -> None:
    assert [Figure("", target, 2.0, "s").held for target in (None, 1.0, 2.0)] == [None, False, True]
    assert [Figure("", target, 2.0, "s", is_least=True).held for target in (None, 2.0, 3.0)] == [None, True, False]
