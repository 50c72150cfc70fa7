"""The options of a search, each named once: its type, range, unit, default and help text.

The command line, Python, the service, its client and the requests to solver processes take them from here. What
`SearchOptions` gets is an option everywhere; `SearchArguments` repeats its type for callers in Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple, Self, TypedDict, cast

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from optpipe.errors import InputError, did_you_mean
from optpipe.evaluate.objective import Objective
from optpipe.model.figures import Items
from optpipe.model.records import Document

MILP = "milp"
RELAX = "relax"  # proves bounds, and finds no schedules
ENGINES = ("dispatch", "lns", "cpsat", MILP, RELAX)
METHOD = r"^[A-Za-z0-9:=,._-]{1,100}$"  # in a list of them
Placements = Literal["keep", "all"]


def _one_method(name: str) -> str:
    if not re.fullmatch(METHOD, name):
        raise PydanticCustomError("method", "a method such as 1f1b or gis:group=5 was expected")
    return name


# PuLP's solvers as people write them: in any case, with or without PuLP's own prefixes and suffixes.
PULP_SOLVERS = (
    *("cbc", "coin", "coinmp", "choco", "copt", "cplex", "cuopt", "fscip", "glpk", "gurobi", "highs", "mipcl"),
    *("mosek", "sas94", "sascas", "scip", "xpress"),
)


def usual_name(solver: str) -> str:
    """A solver of PuLP's by its usual name, such as `cbc` for `PULP_CBC_CMD`."""
    return re.sub(r"_(cmd|py|dll)$", "", solver.lower().removeprefix("pulp_"))


def _milp_solver(name: str) -> str:
    kind, colon, within = name.partition(":")
    one_of_pulp = usual_name(within if colon else kind) in PULP_SOLVERS
    if (kind.lower() == "pulp" and one_of_pulp) if colon else (one_of_pulp or kind.lower() in ("auto", "pulp")):
        return name
    packages = {"highs": "highspy", "gurobi": "gurobipy", "pulp": "pulp"}
    installed = [solver for solver, package in packages.items() if find_spec(package)]
    raise PydanticCustomError(
        "solver",
        "auto, highs, gurobi, pulp or one of PuLP's solvers such as pulp:cbc was expected (installed: {installed})",
        {"installed": ", ".join(installed)},
    )


Method = Annotated[
    str,
    Field(
        min_length=1,
        max_length=100,
        pattern=r"^[^\x00]*$",  # PostgreSQL takes no NUL
        description=f"auto, an engine ({', '.join(ENGINES)}), a heuristic (naive, adaoffload) or a published "
        "schedule such as 1f1b or gis:group=5 (`optpipe compare` lists them).",
    ),
]
Methods = Annotated[
    Items[Annotated[str, AfterValidator(_one_method), Field(json_schema_extra={"pattern": METHOD})]],
    Field(
        min_length=1,
        max_length=100,
        description="Some methods, e.g. 1f1b,gis:group=5,milp,auto; auto is what solve finds. Default: all but single "
        "engines.",
    ),
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
Threads = Annotated[
    int, Field(strict=True, ge=1, le=1024, description="Threads of a search's processes together. Default: all cores.")
]
MemoryMib = Annotated[
    int,
    Field(
        strict=True,
        ge=64,
        le=2**30,
        description="Limit on what a search's processes hold together, in MiB. Default: none.",
    ),
]
Seed = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1, description="Seed of everything random.")]
Solver = Annotated[
    str,
    AfterValidator(_milp_solver),
    Field(
        max_length=100, description="The MILP's solver: auto, highs, gurobi, pulp or one of PuLP's, such as pulp:cbc."
    ),
]
MilpOps = Annotated[
    int,
    Field(
        strict=True,
        ge=1,
        le=2**31 - 1,
        description="Compute ops up to which milp searches a problem. Default: 400; no limit with a licence of Gurobi.",
    ),
]
PlacementsOption = Annotated[
    Placements,
    Field(
        description="keep the stages as given, or search all: one chunk a device, looped or V-shaped chunks, "
        "the layers split anew."
    ),
]


class SearchOptions(Document):
    """What every search can be asked for, whatever its method."""

    WHAT = "options"

    objective: ObjectiveOption = "makespan"
    time_limit_s: TimeLimit = 60.0
    gap: Gap = 0.0
    threads: Threads | None = None
    memory_mib: MemoryMib | None = None
    seed: Seed = 0
    solver: Solver = "auto"
    milp_ops: MilpOps | None = None
    placements: PlacementsOption = "keep"

    @classmethod
    def from_arguments(cls, what: str, given: Mapping[str, Any]) -> Self:
        """The options given by name, the others by default.

        Raises InputError for an unknown name and for a wrong value; the sentence begins with `what`.
        """
        if unknown := sorted(given.keys() - cls.model_fields.keys()):
            hint = did_you_mean(unknown[0], cls.model_fields, "; ") or f"; expected {', '.join(cls.model_fields)}"
            raise InputError(f"{what}: {unknown[0]} is not an option{hint}")
        return cls.from_dict(given, what)

    def search(self) -> SearchArguments:
        """The options of a search with any method, as keyword arguments."""
        return cast(SearchArguments, self.model_dump(include=set(SearchOptions.model_fields)))


class SearchArguments(TypedDict, total=False):
    """`SearchOptions` as keyword arguments: type checkers see these, a test compares the two."""

    objective: Objective
    time_limit_s: float
    gap: float
    threads: int | None
    memory_mib: int | None
    seed: int
    solver: str
    milp_ops: int | None
    placements: Placements


class SolveOptions(SearchOptions):
    """What `solve`, a job of the service and a training's client can be asked for."""

    method: Method = "auto"

    @property
    def ends_when_proven(self) -> bool:
        """Whether a proven schedule ends the search. The MILP, asked for by name, runs whatever is known."""
        return self.method != MILP

    @property
    def starts_from_known(self) -> bool:
        """Whether a search may begin with a schedule that is known: not if a heuristic or a published schedule was
        asked for, which make their own."""
        return self.method in ("auto", *ENGINES)

    @property
    def answered_by_optimum(self) -> bool:
        """Whether a proven schedule of the stages as given, such as a cached one, is the answer."""
        return self.method == "auto" and self.placements == "keep"

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
    methods: Methods | None = None


class Option(NamedTuple):
    """One option as help texts and tables show it."""

    name: str
    kind: str  # number, integer, string or array
    choices: tuple[str, ...]  # of a string, where only these are allowed
    values: str  # which values are allowed, in words
    default: Any
    help: str


def listed(record: type[SearchOptions]) -> list[Option]:
    """The options of a record, the method first."""
    properties = record.model_json_schema()["properties"]
    names = sorted(record.model_fields, key=lambda name: name in SearchOptions.model_fields)
    return [_option(name, properties[name]) for name in names]


def _option(name: str, described: Mapping[str, Any]) -> Option:
    schema = described.get("anyOf", [described])[0]  # of a value or null
    choices = tuple(schema.get("enum", ()))
    # Some versions of pydantic write 1 as 1.0. The largest ends have 10 digits.
    ends = (("exclusiveMinimum", "above {:,.10g}"), ("minimum", "{:,.10g} or more"), ("maximum", "at most {:,.10g}"))
    values = ", ".join(choices or [text.format(schema[end]) for end, text in ends if end in schema])
    return Option(name, schema["type"], choices, values, described.get("default"), schema["description"])
