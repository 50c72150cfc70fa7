"""The options of a search, each declared once: name, type, range, default and help.

The command line, Python, the service, its client and the requests to solver processes take them from here. What
`SearchOptions` gets is an option everywhere; `SearchArguments` repeats its type for callers in Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypedDict, cast

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from optpipe import solvers
from optpipe.errors import InputError, did_you_mean
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.model.records import Document, Items

METHOD = r"^[A-Za-z0-9:=,._-]{1,100}$"  # in a list of them
Placements = Literal["keep", "all"]
StackName = Literal["torch", "megatron", "primus", "optpipe"]
Triangles = Literal["none", "compute", "all"]


def _at_commas(methods: Any) -> Any:
    """Split a text at commas, except those between the parameters of one method."""
    return [name.strip() for name in re.split(r",(?![a-z][a-z_]*=)", methods)] if isinstance(methods, str) else methods


def _one_method(name: str) -> str:
    if not re.fullmatch(METHOD, name):
        raise PydanticCustomError("method", "a method such as 1f1b or gis:group=5 was expected")
    return name


def _milp_solver(name: str) -> str:
    if complaint := solvers.installed().milp_complaint(name):
        raise PydanticCustomError("solver", "{complaint}", {"complaint": complaint})
    return name


Methods = Annotated[
    Items[Annotated[str, AfterValidator(_one_method), Field(json_schema_extra={"pattern": METHOD})]],
    BeforeValidator(_at_commas),
    Field(min_length=1, max_length=100),
]
ObjectiveOption = Annotated[
    Objective, Field(description="makespan, or span: the longest time of one device (OptPipe, Eq. 3).")
]
TimeLimit = Annotated[float, Field(strict=True, gt=0, le=86_400, description="Seconds that a search may take.")]
Gap = Annotated[
    float,
    Field(
        strict=True,
        ge=0,
        le=1,
        description="A search ends once no schedule can be shorter by more than this share; 0: once that is proven.",
    ),
]
Threads = Annotated[int, Field(strict=True, ge=1, le=1024)]
Solver = Annotated[
    str,
    AfterValidator(_milp_solver),
    Field(
        max_length=100, description="The MILP's solver: auto, highs, gurobi, pulp or one of PuLP's, such as pulp:cbc."
    ),
]
PlacementsOption = Annotated[
    Placements,
    Field(
        description="keep the stages as given, or search all: one chunk a device, looped or V-shaped chunks, "
        "the layers split anew."
    ),
]


class EffortOptions(Document):
    """How long and how hard something is searched."""

    WHAT = "options"

    time_limit_s: TimeLimit = 60.0
    gap: Gap = 0.0
    threads: Threads | None = Field(
        default=None, description="Threads of a search's processes together. Default: all cores."
    )
    seed: int = Field(default=0, strict=True, ge=0, le=2**31 - 1, description="Seed of everything random.")

    @classmethod
    def from_arguments(cls, what: str, arguments: Mapping[str, Any]) -> Self:
        """These options, the others by default. Raises InputError about `what` for an unknown name or a wrong value."""
        if unknown := sorted(arguments.keys() - cls.model_fields.keys()):
            hint = did_you_mean(unknown[0], cls.model_fields, "; ") or f"; expected {', '.join(cls.model_fields)}"
            raise InputError(f"{what}: {unknown[0]} is not an option{hint}")
        return cls.from_dict(arguments, what)


class SearchOptions(EffortOptions):
    """What every search can be asked for, whatever its method."""

    objective: ObjectiveOption = "makespan"
    memory_mib: int | None = Field(
        default=None,
        strict=True,
        ge=64,
        le=2**30,
        description="Limit on what a search's processes hold together, in MiB. Default: none.",
    )
    solver: Solver = "auto"
    milp_ops: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=2**31 - 1,
        description="Compute ops up to which milp searches the whole. Default: 400, in auto 60; no limit by name with "
        "a licence of Gurobi.",
    )
    triangles: Triangles = Field(
        default="compute",
        description="The whole MILP's triangle cuts: none, of the orders of compute ops, or of all orders.",
    )
    placements: Placements | None = Field(
        default=None,
        description="keep the stages as given, or search all: one chunk a device, looped or V-shaped chunks, "
        "the layers split anew. Default: all if the problem has layers.",
    )

    stack: StackName = Field(default="optpipe", description="Search only what torch, megatron or primus can run.")

    def placements_of(self, problem: Problem) -> Placements:
        """The stages that a search of this problem may choose."""
        return self.placements or ("all" if problem.layers else "keep")

    def for_problem(self, problem: Problem) -> Self:
        """These options with the stages that a search of this problem may choose."""
        return self.model_copy(update={"placements": self.placements_of(problem)})

    def search(self) -> SearchArguments:
        """The options of a search with any method, as keyword arguments."""
        return cast(SearchArguments, self.model_dump(include=set(SearchOptions.model_fields)))


class SearchArguments(TypedDict, total=False):
    """`SearchOptions` as keyword arguments: type checkers see these, a test compares the two."""

    time_limit_s: float
    gap: float
    threads: int | None
    seed: int
    objective: Objective
    memory_mib: int | None
    solver: str
    milp_ops: int | None
    triangles: Triangles
    placements: Placements | None
    stack: StackName


class SolveOptions(SearchOptions):
    """What `solve`, a job of the service and a training's client can be asked for."""

    method: str = Field(
        default="auto",
        min_length=1,
        max_length=100,
        pattern=r"^[^\x00]*$",  # PostgreSQL takes no NUL
        description="auto, an engine, a heuristic or a published schedule such as 1f1b or gis:group=5 "
        "(`optpipe compare` lists them).",
    )

    @property
    def ends_when_proven(self) -> bool:
        """Whether a proven schedule ends the search, rather than going on whatever there is."""
        return self.method not in solvers.installed().EXHAUSTIVE

    @property
    def starts_from_known(self) -> bool:
        """Whether a search may begin with a schedule: heuristics and published schedules make their own."""
        return self.method in ("auto", *solvers.installed().ENGINES)

    @property
    def answered_by_optimum(self) -> bool:
        """Whether a proven schedule of the problem's own stages, such as a cached one, is the answer."""
        return self.method == "auto" and self.placements != "all"

    def arguments(self) -> SolveArguments:
        """The options as keyword arguments."""
        return {**self.search(), "method": self.method}


class SolveArguments(SearchArguments, total=False):
    """`SolveOptions` as keyword arguments."""

    method: str


class CompareOptions(SearchOptions):
    """What `compare` can be asked for: the options of its searches, and which methods it compares."""

    time_limit_s: TimeLimit = 10.0
    placements: PlacementsOption = "all"
    methods: Methods | None = Field(
        default=None,
        description="Some methods, e.g. 1f1b,gis:group=5,milp,auto; auto is what solve finds. Default: all but single "
        "engines.",
    )
