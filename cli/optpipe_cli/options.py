"""The options of a search on the command line, made from their one list, `optpipe.options`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from optpipe.errors import InputError

if TYPE_CHECKING:
    from optpipe.options import Option, SearchOptions

Command = Callable[..., None]
KINDS = {"number": float, "integer": int, "string": str, "array": str}


# Under which heading the help of a command with many options lists each; what is not listed here is an "Option".
FILES_OR_NAMES = ("name", "gpu")  # what is a preset's name or a file's
MOST_IN_ONE = 8  # options; a command with more has headings
PANELS = {
    "Division over GPUs": (
        *("pp", "tp", "cp", "ep", "dp", "zero", "chunks", "shape", "layers", "sequence_parallel"),
        *("gpus", "today", "stack", "offload", "margin"),
    ),
    "What runs": (
        *("model", "gpu", "batch", "microbatches", "microbatch_size", "sequence", "precision", "attention", "fused"),
        *("recompute", "gradient_bytes", "optimizer_bytes", "expert_load", "host_memory_gb"),
        *("activation_budget_bytes", "offload_parts"),
    ),
    "Search": (
        *("method", "methods", "objective", "time_limit_s", "gap", "threads", "memory_mib", "seed", "solver"),
        *("milp_ops", "placements", "warm_start", "no_cache", "service", "solves"),
    ),
    "Output": ("output", "html", "json", "pictures", "explain", "log_json", "presets", "help"),
    "Limits": ("open_jobs", "keep", "keep_days", "streams"),
}


class InPanels(TyperCommand):
    """A command whose help lists its options under headings if there are many, that takes no empty file name, and whose
    errors name the flag that the user knows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_empty = any(not arg or arg.endswith("=") for arg in args)
        rest = super().parse_args(ctx, args)
        for param in self.get_params(ctx) if is_empty else ():
            if ctx.params.get(param.name) in (Path(), *([""] if param.name in FILES_OR_NAMES else [])):
                named = param.opts[0] if isinstance(param, TyperOption) else param.metavar or param.name.upper()
                raise InputError(f"{named} is empty: the name of a file or a folder was expected")
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            options = [param.name for param in self.get_params(ctx) if isinstance(param, TyperOption) and param.name]
            raise with_flag(error, options) from None

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        if len(params) > MOST_IN_ONE:
            for param in params:
                heading = next((heading for heading, names in PANELS.items() if param.name in names), None)
                if heading and isinstance(param, TyperOption):
                    param.rich_help_panel = heading
        return params


def with_options(
    record: str, only: Collection[str] = (), each: Collection[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """Give a command an option for each field of a record of `optpipe.options`, which it takes as `options`.

    They are made when the command runs or shows its help: `optpipe --help` does not wait for pydantic.

    Parameters
    ----------
    only
        The fields that the command has options for; all by default.
    each
        Fields for which several values may be given, at commas. The command then takes a list of records, one for
        each combination of them.
    defaults
        Those of the command where they differ from the record's.
    """

    def decorate(function: Command) -> Command:
        class WithOptions(InPanels):
            @cached_property
            def _whole(self) -> Any:
                from optpipe import options

                app = typer.Typer(add_completion=False)
                app.command(self.name, cls=InPanels)(_flagged(function, getattr(options, record), only, each, defaults))
                return typer.main.get_command(app)

            def get_params(self, ctx: Any) -> Any:
                return self._whole.get_params(ctx)

            def invoke(self, ctx: Any) -> Any:
                return self._whole.invoke(ctx)

        def command() -> None:
            """Stands for the function until its options are made."""

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__dict__["command_class"] = WithOptions
        return command

    return decorate


def register(app: typer.Typer, heading: str | None, *commands: Command) -> None:
    """Add commands, which the help lists under a heading."""
    for command in commands:
        name = command.__name__.rstrip("_")
        app.command(name, cls=getattr(command, "command_class", InPanels), rich_help_panel=heading)(command)


def flag(name: str) -> str:
    """The flag of an option: `--time-limit` of `time_limit_s`."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def numbers(name: str, text: str | None, expected: str) -> list[int] | None:
    """The numbers of an option such as `9,10,10,9`."""
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"{flag(name)} = {text!r}: {expected}") from None


def at_commas(text: str) -> list[str]:
    """Split at commas, except those between the parameters of one method."""
    return [name.strip() for name in re.split(r",(?![a-z][a-z_]*=)", text)]


def _flagged(
    function: Command,
    record: type[SearchOptions],
    only: Collection[str],
    each: Collection[str],
    defaults: dict[str, Any],
) -> Command:
    """The function with a parameter for each option in the place of `options`."""
    from optpipe.options import listed

    options = {
        option.name: _parameter(option, defaults) for option in listed(record) if not only or option.name in only
    }

    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        several = {name: at_commas(values[name]) for name in each if isinstance(values[name], str)}
        records = [
            _checked(record, {name: _read(kinds[name], name, value) for name, value in (values | one).items()})
            for one in (dict(zip(several, chosen, strict=True)) for chosen in product(*several.values()))
        ]
        function(options=records if each else records[0], **given)

    kinds = {option.name: KINDS[option.kind] for option in listed(record)}
    parameters = [
        parameter.replace(annotation=eval(parameter.annotation, function.__globals__))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "options"
    ]
    arguments = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    rest = [parameter for parameter in parameters if parameter not in arguments]
    signature = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*arguments, *options.values(), *rest)]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    run.__annotations__, run.__doc__ = {}, function.__doc__
    return run


def _parameter(option: Option, defaults: dict[str, Any]) -> inspect.Parameter:
    default = defaults.get(option.name, option.default)
    kind: Any = KINDS[option.kind]
    shown = typer.Option(
        flag(option.name),
        help=option.help,
        metavar="|".join(option.choices) or {float: "NUMBER", int: "INTEGER"}.get(kind),
        parser=str,  # `_read` reads numbers: its sentence names the option and the text
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, shown],
    )


def _read(kind: type[Any], name: str, given: Any) -> Any:
    """A default, or what a text says."""
    try:
        return kind(given) if isinstance(given, str) else given
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise InputError(f"{flag(name)} = {given!r}: {expected} was expected") from None


def _checked(record: type[SearchOptions], given: dict[str, Any]) -> SearchOptions:
    """The record."""
    if given.get("methods") is not None:
        given["methods"] = at_commas(given["methods"])
    return record.from_arguments("options", given)


def with_flag(error: InputError, names: Collection[str]) -> InputError:
    """The error with the flag that the user knows in the place of the option's name, with which it begins.

    `names` are those of the options: what else an error begins with, such as a file, stays as it is.
    """

    def told(found: re.Match[str]) -> str:
        return flag(found[1]) if found[1] in names else found[0]

    return type(error)(re.sub(r"^(?:options: )?(\w+)(?=(?:\[\d+\])? =| is missing| has )", told, str(error)))
