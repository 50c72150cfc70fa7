"""`OtherStages`: a search for another placement, beside a training that keeps its stages."""

from __future__ import annotations

import logging

from optpipe.errors import InputError
from optpipe.known import ScheduleCache
from optpipe.schedule import Schedule
from optpipe_runtime.service.client import ClientOptions, ScheduleClient

log = logging.getLogger("optpipe.follow")


class OtherStages:
    """Used on the rank that has the client. Such a schedule cannot be swapped in: parameters and optimizer states would
    have to move. So the best is kept in `best`, for the next start from a checkpoint.

    `running` is what runs, as a schedule of the problem with layers, from which both times are predicted. Other
    arguments are those of `ScheduleClient`.
    """

    def __init__(
        self,
        url: str | None,
        running: Schedule,
        key: str | None,
        cache: ScheduleCache | None,
        options: ClientOptions,
    ) -> None:
        self.best: Schedule | None = None
        self._running = running
        self._client = ScheduleClient(
            url,
            running.problem,
            warm_start=running,
            key=key,
            cache=cache,
            wanted=lambda schedule: schedule.problem.stages != running.problem.stages,
            **options.arguments(),
        )

    def poll(self) -> None:
        """Never blocks."""
        offer = self._client.poll()
        if offer is None:
            return
        self.best = offer.schedule
        log.info(
            "a schedule for other stages (%s) takes %.1f ms a step where this one takes %.1f, as predicted: it is kept "
            "for the next start from a checkpoint",
            offer.schedule.placement or "as given",
            offer.makespan_ms,
            self._running.makespan_ms,
        )

    def close(self) -> None:
        self._client.close()


def layered(schedule: Schedule | None) -> Schedule:
    """The schedule, if stages can be made of its problem's layers in other ways. Raises `InputError` if not."""
    if schedule is None or schedule.problem.layers is None:
        raise InputError(
            "placements = 'all': the problem has no layers; before the first step, load a schedule of a problem by "
            "profile_layers"
        )
    return schedule
