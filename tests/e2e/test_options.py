"""Every option of a search arrives through every door with its value; a wrong value is refused in the same words."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import httpx
import pytest
from cyclopts import CycloptsError
from support.problems import pipeline, stage
from support.problems.chain import chain
from support.processes import until
from support.service import running, settings_in, use_fake_solver

import optpipe
from optpipe import InputError, Result, ScheduleFile, anytime, check, comparison, solvers
from optpipe.options import (
    CompareOptions,
    SearchArguments,
    SearchOptions,
    SolveArguments,
    SolveOptions,
)
from optpipe.process import child
from optpipe_cli import main as cli
from optpipe_cli.app import option_name
from optpipe_cli.app import optpipe as program
from optpipe_runtime import ScheduleClient
from optpipe_runtime.service import follow

PROBLEM = chain()
PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
NOWHERE = "http://127.0.0.1:1"
TEXTS = {"method": "cpsat", "solver": "pulp:CBC", "methods": ["1f1b", "milp"]}
OTHER = {"number": 0.25, "integer": 64}
WRONG = {"number": -1.0, "integer": -1, "string": "\0" * 101, "array": []}


def schemas(record: type[SearchOptions]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each option of a record, without null."""
    properties = record.model_json_schema()["properties"]
    return {name: schema | schema.get("anyOf", [{}])[0] for name, schema in properties.items()}


def others(record: type[SearchOptions]) -> dict[str, Any]:
    """A valid value of each option that is not the default."""
    values = {}
    for name, schema in schemas(record).items():
        choices = [choice for choice in schema.get("enum", ()) if choice != schema["default"]]
        values[name] = choices[-1] if choices else TEXTS.get(name, OTHER.get(schema["type"]))
        assert values[name] not in (None, schema.get("default")), f"{name} needs a value to be tested with"
    return values


SOLVE, COMPARE = others(SolveOptions), others(CompareOptions)
TRAINING = SOLVE | {"placements": "keep"}
Requests = list[SearchOptions]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """What solvers' processes are asked for."""
    requests: Requests = []

    class Recorded(child.Child):
        def __init__(self, module: str, request: Any = None, admit: Any = None) -> None:
            requests.append(request)
            super().__init__(module, request, admit)

    use_fake_solver(monkeypatch)
    monkeypatch.delenv("OPTPIPE_KEY", raising=False)
    monkeypatch.setattr(solvers.installed(), "COMPARE", "support.fakes.lying_compare_solver")
    for module in (anytime, comparison):
        monkeypatch.setattr(module, "Child", Recorded)
    return requests


def words(options: dict[str, Any]) -> list[str]:
    texts = {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in options.items()}
    return [word for name, text in texts.items() for word in (f"--{option_name(name)}", text)]


def run(*command: str, options: dict[str, Any], folder: Path) -> None:
    PROBLEM.save(folder / "p.json")
    arguments = [str(folder / "p.json") if word == "PROBLEM" else word for word in command]
    try:
        with contextlib.suppress(SystemExit):
            program()([*arguments, *words(options)])
    except CycloptsError as error:
        raise InputError(cli.sentence(error)) from None


@pytest.fixture(scope="module")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service that refuses what it is sent."""
    with running(replace(settings_in(tmp_path_factory.mktemp("service")), solves=0)) as (url, _):
        yield url


def post(url: str, path: str, options: dict[str, Any]) -> Any:
    sent = {"problem": PROBLEM.to_dict(), **options}
    reply = httpx.post(f"{url}/v1/{path}", json=sent, timeout=60, trust_env=False)
    if reply.status_code == 422:
        raise InputError(reply.json()["detail"])
    return reply.raise_for_status().json()


def arrived(asked: Requests, options: dict[str, Any]) -> None:
    """The one search has these options."""
    (request,) = asked
    assert {name: value for name, value in request.model_dump().items() if name in options} == options


def compared(asked: Requests, options: dict[str, Any]) -> None:
    """The process that makes schedules, and the search with the engine that is named, have these options."""
    made, search = (request.model_dump(mode="json") for request in asked)
    assert (made.pop("methods"), search.pop("method")) == (["1f1b"], "milp")
    for values in (made, search):
        assert values.items() >= {name: value for name, value in options.items() if name != "methods"}.items()


def test_arguments_are_typed_as_the_options_are() -> None:
    for arguments, record in ((SearchArguments, SearchOptions), (SolveArguments, SolveOptions)):
        types = get_type_hints(record)
        assert get_type_hints(arguments) == {name: types[name] for name in record.model_fields}


Door = Callable[[Path, dict[str, Any]], Any]
SOLVING: dict[str, Door] = {
    "optpipe.solve": lambda _, options: optpipe.solve(PROBLEM, **options),
    "optpipe solve": lambda folder, options: run("solve", "PROBLEM", "--no-cache", options=options, folder=folder),
}
COMPARING: dict[str, Door] = {
    "optpipe.compare": lambda _, options: optpipe.compare(PROBLEM, **options),
    "optpipe compare": lambda folder, options: run("compare", "PROBLEM", options=options, folder=folder),
}


@pytest.mark.parametrize("door", SOLVING)
def test_a_search_has_the_options(door: str, asked: Requests, tmp_path: Path) -> None:
    SOLVING[door](tmp_path, SOLVE)
    arrived(asked, SOLVE)


@pytest.mark.parametrize("door", COMPARING)
def test_a_comparison_has_the_options(door: str, asked: Requests, tmp_path: Path) -> None:
    COMPARING[door](tmp_path, COMPARE)
    compared(asked, COMPARE)


@pytest.mark.parametrize("by", ["REST", "ScheduleClient"])
def test_a_job_of_the_service_has_the_options(by: str, asked: Requests, tmp_path: Path) -> None:
    with running(replace(settings_in(tmp_path), threads=64)) as (url, _):
        if by == "REST":
            assert post(url, "jobs", SOLVE)["options"] == SOLVE
            until(lambda: asked)
        else:
            with ScheduleClient(url, PROBLEM, **SOLVE) as client:
                until(lambda: asked and client.ended)
    arrived(asked, SOLVE)


def test_a_training_has_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower hands them to its client."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(follow, "ScheduleClient", lambda url, problem, **options: given.update(options))
    pipe: Any = SimpleNamespace(number=0, leads=True, schedule=None)
    follow.Follower(pipe, NOWHERE, **TRAINING)._follow(PROBLEM)
    assert {name: given[name] for name in TRAINING} == TRAINING


@pytest.mark.parametrize("options", [{"placements": "all"}, {"objective": "span"}], ids=str)
def test_what_counts_is_the_same_in_the_solver_the_service_and_the_client(options: Any, tmp_path: Path) -> None:
    """By a real solver: schedules for other stages are served whole, and better is what the options say."""
    problem = pipeline(2, 4, 4000, stage((2, 1, 2), (1000, 500)))
    chosen = SolveOptions(method="zb-v" if "placements" in options else "1f1b", **options)
    with running(settings_in(tmp_path)) as (url, _):
        job = post(url, "jobs", {"problem": problem.to_dict(), **chosen.arguments()})
        found = ScheduleFile.model_validate(job["best"]["schedule"])
        schedule = found.schedule()
        assert check(found.problem, schedule) == []
        placed = schedule.placement.apply(problem) if schedule.placement else problem
        assert (found.problem, schedule.placement is not None) == (placed, "placements" in options)
        assert job["best"]["value_ms"] == Result.from_schedule(schedule, chosen).value_ms
        again = httpx.get(f"{url}{job['url']}/figure", trust_env=False).json()
        assert again["schedules"][0]["makespan_ms"] == schedule.makespan_ms
        carried = post(url, "jobs", {"problem": problem.to_dict(), "warm_start": job["best"]["schedule"], **options})
        assert carried["best"]["value_ms"] <= job["best"]["value_ms"]
        with ScheduleClient(url, problem, **chosen.arguments()) as client:
            offer = until(client.poll)
        assert offer.schedule.problem == placed


@pytest.mark.parametrize("option", SOLVE)
def test_a_wrong_value_is_refused_in_the_same_words(
    option: str, shared_url: str, asked: Requests, tmp_path: Path
) -> None:
    doors: dict[str, Door] = {
        "job": lambda _, options: post(shared_url, "jobs", options),
        "ScheduleClient": lambda _, options: ScheduleClient(NOWHERE, PROBLEM, **options),
        "Follower": lambda _, options: follow.Follower(None, NOWHERE, **options),
        **SOLVING,
        **(COMPARING if option in CompareOptions.model_fields else {}),
    }
    schema, told = schemas(SolveOptions)[option], set()
    for name, door in doors.items():
        with pytest.raises(InputError) as refused:
            door(tmp_path, {option: "neither" if "enum" in schema else WRONG[schema["type"]]})
        text = str(refused.value).replace(f"--{option_name(option)}", option).replace("'", "")
        told.add(re.sub(r"^(solve|improve|compare|body|ScheduleClient|Follower): ", "", text))
        assert "\n" not in text, name
    (said,) = told
    assert said.startswith(f"{option} = ")
    assert asked == []


def test_the_page_has_a_table_of_all_options() -> None:
    lines = []
    for name, schema in schemas(SolveOptions).items():
        default = "" if schema["default"] is None else f"`{schema['default']}`"
        lines.append(f"| `--{option_name(name)}` | `{name}` | {default} | {schema['description']} |\n")
    assert "".join(lines) in PAGE
