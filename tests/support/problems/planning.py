"""Questions to the planner: six layers on four GPUs, and plans without searches."""

from optpipe.options import SearchOptions
from optpipe.transformer.presets import GPUS
from optpipe.transformer.records import Run, Transformer
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import Question, branches, candidates
from optpipe_solver.planner.plan import Plan
from optpipe_solver.planner.search import PlanSearch
from optpipe_solver.planner.today import Today

SMALL = Transformer(layers=6, hidden=2048, ffn=8192, heads=2, vocabulary=64_000, sequence=2048)
RESERVED = GPUS["A100"].reserved_bytes


def question(memory_bytes: int = RESERVED + 3_200_000_000, **fields: object) -> Question:
    """Six layers on four GPUs, so little memory that activations decide."""
    gpu = GPUS["A100"].model_copy(update={"memory_bytes": memory_bytes, "gpus_per_node": 2})
    asked = {"model": SMALL, "gpu": gpu, "gpus": 4, "batch": 8, "run": Run(microbatches=1), "margin": 0.0}
    return Question.from_dict(asked | fields)


def planned(asked: Question, gap: float = 0.0, today: str | None = None) -> Plan:
    """A plan without searches; its other work is counted, and there is enough of it for everything."""
    options = SearchOptions(time_limit_s=10_000.0, gap=gap)
    runs = Today.read(today) if today else None
    return PlanSearch(asked, lambda problem, start, seconds: None, options, 1, runs).run()


def every(asked: Question) -> list[Candidate]:
    """All that a plan chooses from, the lowest bound first."""
    roots = candidates(asked)
    for root in roots:
        root.bound_ms = root.work_ms  # its own
    return sorted([*roots, *(branch for root in roots for branch in branches(asked, root))], key=lambda c: c.bound_ms)
