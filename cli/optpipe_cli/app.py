"""`optpipe`: all commands. The module of a command is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyclopts import UNSET, App, ArgumentCollection, Group, Parameter

from optpipe import __version__
from optpipe.errors import InputError

# What brings a user here: what to run first and next, and all commands for it.
TASKS = {
    "See what it does": ("Needs no model, no GPU and no torch.", "try"),
    "My run is out of memory": ("First plan with --today, then profile, then solve.", "plan profile solve"),
    "My run is slow, here is a trace": ("First diagnose; its -o writes what cures it.", "diagnose problem"),
    "I start a new run": ("First plan, then profile and solve.", "plan model calibrate export"),
    "I write a paper": ("First compare, then show and check.", "compare show check simulate import"),
    "I run it for a team": ("First serve, then keys, then solve --url.", "serve worker jobs keys cache"),
}
COMMANDS = {
    "try": ("compare:try_", "Show published schedules of an example, what OptPipe gains over them, and a page."),
    "plan": ("plan:plan", "Divide a model over GPUs and schedule it, as fast as memory allows."),
    "profile": ("profile:profile", "Measure a model's stages, copies and messages, and make a problem of them."),
    "solve": ("solve:solve", "Find the best schedule within the time limit, or say what would fit."),
    "diagnose": ("traces:diagnose", "Say where the time of a trace's steps goes, why, and what to change."),
    "model": ("model:model", "Make a problem of a transformer's shape, by formula, and say what was assumed."),
    "calibrate": ("calibrate:calibrate", "Learn the cost model's parameters, from kernels or measured iterations."),
    "export": ("schedule_commands:export", "Write a schedule as another program takes it, such as PyTorch."),
    "compare": ("compare:compare", "Compare all published schedules, heuristics and the solver's answer."),
    "show": ("schedule_commands:show", "Show a schedule in the terminal, or write a page, a picture or a trace."),
    "check": ("schedule_commands:check", "Say all that is wrong with a schedule; exit code 1 if anything is."),
    "simulate": ("schedule_commands:simulate", "Compute the times of a schedule for a problem."),
    "import": ("schedule_commands:import_", "Read a schedule of another program, and check it."),
    "serve": ("service:serve", "Run the service that solves problems while a training runs."),
    "worker": ("service:worker", "Solve jobs of a service whose database is PostgreSQL, until it is stopped."),
}
GROUPS = {
    "problem": "Make a problem of what another program has measured.",
    "jobs": "See and steer the jobs of a service.",
    "keys": "Say who may use the service, and for what. Until there is a key, everybody on this machine.",
    "cache": "Find, keep and exchange solved schedules.",
}
OF_GROUP = {
    "problem": {
        "from": ("traces:from_", "Make a problem of op times; say what they leave open, and what was not used.")
    },
    "cache": {
        "lookup": ("cache:lookup", "Find the schedule of this problem or of the most similar one; or exit code 1."),
        "add": ("cache:add", "Check and add schedules, without their bounds; none if one is not valid."),
        "list": ("cache:list_", "List the schedules in the cache."),
        "export": ("cache:export", "Write all entries to a file for `import`."),
        "import": ("cache:import_", "Check and add the entries of a file that `export` wrote, without their bounds."),
        "prune": ("cache:prune", "Delete all but the entries that were used last."),
    },
    "jobs": {
        "list": ("jobs:list_", "List the newest jobs, and why some have failed."),
        "show": ("jobs:show", "Show a job with its log, or write its best schedule."),
        "extend": ("jobs:extend", "Give an open job more time."),
        "cancel": ("jobs:cancel", "End a job, which keeps its best schedule."),
    },
    "keys": {
        "create": ("service:create", "Create a key and print it. It is stored as a hash and cannot be shown again."),
        "list": ("service:list_", "List all keys without their secrets."),
        "revoke": ("service:revoke", "Revoke a key. A service whose last key is revoked does not open."),
    },
}


def option_name(field: str) -> str:
    """The name of an option or a command: `time-limit` of `time_limit_s`."""
    return field.strip("_").removesuffix("_s").replace("_", "-")


def new_app(name: str, help: str | None = None, **others: Any) -> App:
    """A program whose errors are raised, and whose help shows no empty default."""
    return App(
        name=name,
        help=help,
        config=_refuse_empty_words,
        default_parameter=Parameter(
            negative_iterable=(), allow_repeating=True, name_transform=option_name, show_default=_shown_default
        ),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        **others,
    )


def _shown_default(value: Any) -> str | None:
    return None if value is None or value is False or value == () else str(value)


def _refuse_empty_words(_apps: Any, _commands: Any, arguments: ArgumentCollection) -> None:
    for argument in arguments:
        for token in argument.tokens:
            if token.value == "" and token.implicit_value is UNSET:
                raise InputError(f"{argument.name} is empty: a name or a number was expected")


def optpipe() -> App:
    """The program with all its commands."""
    app = new_app(
        "optpipe",
        "Schedules for pipeline-parallel training: as short as possible, never above the memory limit.",
        version=f"optpipe {__version__}",
    )
    panels = [(Group.create_ordered(task, help=first), names.split()) for task, (first, names) in TASKS.items()]
    of_task = {name: tuple(panel for panel, names in panels if name in names) for name in (*COMMANDS, *GROUPS)}
    _add(app, COMMANDS, of_task)
    for name, about in GROUPS.items():
        app.command(inner := App(name=name, help=about, group=of_task[name]))
        _add(inner, OF_GROUP[name], {})
    return app


def _add(app: App, commands: Mapping[str, tuple[str, str]], panels: Mapping[str, tuple[Group, ...]]) -> None:
    for place, (name, (function, about)) in enumerate(commands.items()):
        app.command(f"optpipe_cli.{function}", name=name, help=about, sort_key=place, group=panels.get(name))
