"""What the ranks run in `test_message_room`: a schedule whose messages pile up, at two budgets."""

from __future__ import annotations

import logging

from optpipe.errors import ScheduleError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport
from optpipe_runtime.execute.messages import messages_reserve
from support.ranks.cases import batch, loss_fn, own_stages

PLACEMENT = [0, 1]
STEPS = 2000  # within which an offer must have been answered


def with_budget(problem: Problem, nbytes: int) -> Problem:
    devices = [device.model_copy(update={"activation_budget_bytes": nbytes}) for device in problem.devices]
    return problem.replace(devices=devices)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def piled_up(first: Schedule, piles: Schedule) -> tuple[str, list[str], int, StepReport]:
    """Trains by `first`. With one byte too few for the messages of `piles`, loads it and is offered it; with that byte,
    is offered it again. Returns what `load` said, the log, the bytes of messages above those set aside, and a step by
    `piles`."""
    m, log = first.problem.microbatches, _Lines()
    logger = logging.getLogger("optpipe.runtime")
    logger.addHandler(log)
    complaint = ""
    with Pipeline(own_stages(PLACEMENT), PLACEMENT, loss_fn, m) as pipe:
        pipe.problem = first.problem
        pipe.load(first)
        pipe.step(*batch(0, m))
        rank = pipe._rank
        plan = pipe.prepare(piles)
        above = plan.message_peak(rank.message_bytes) - messages_reserve(rank.number, rank.layout, rank.io)
        needed = max(pipe.gather(above)) + plan.certificate.device[1].bytes
        pipe.problem = with_budget(first.problem, needed - 1)
        try:
            pipe.load(piles)
        except ScheduleError as error:
            complaint = str(error)
        if pipe.number == 0:
            pipe.offer(piles)
        pipe.step(*batch(0, m))
        pipe.step(*batch(0, m))
        while pipe.preparing:  # until it is refused
            pipe.step(*batch(0, m))
        assert pipe.version == 1
        pipe.problem = with_budget(first.problem, needed)
        if pipe.number == 0:
            pipe.offer(piles)
        for _ in range(STEPS):
            report = pipe.step(*batch(0, m))
            if pipe.version == 2:
                break
        logger.removeHandler(log)
        return complaint, log.lines, above, report
