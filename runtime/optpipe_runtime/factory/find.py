"""`find_factory`: what a user's word for a model means."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optpipe.errors import InputError
from optpipe_runtime.factory.huggingface import of_config
from optpipe_runtime.factory.setup import Factory, Setup, Sizes
from optpipe_runtime.factory.torchtitan import PREFIX, of_flavour


def find_factory(model: str, sizes: Sizes) -> Factory:
    """What makes the stages and the batch of a rank.

    Parameters
    ----------
    model
        `module:function`: a user's function, which is called with rank and ranks. The module may be in the current
        folder or beside the script. `torchtitan:MODEL/FLAVOUR`: a model of torchtitan. The path of a `config.json`: a
        causal language model of transformers.
    sizes
        Of the batch. A function makes its own.

    Raises
    ------
    InputError
        If there is no such model, its package is not installed, or it cannot be measured.
    """
    if model.endswith(".json"):
        return of_config(model, sizes)
    if model.startswith(PREFIX):
        return of_flavour(model, sizes)
    for name in ("microbatch_size", "sequence"):
        if getattr(sizes, name) is not None:
            raise InputError(f"{name} = {getattr(sizes, name)}: model = {model!r} makes its own batch, so leave it out")
    return _of_function(model)


def _of_function(name: str) -> Factory:
    """The function of this name. Raises `InputError` if there is none."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name.isidentifier()):
        raise InputError(
            f"model = {name!r}: must be MODULE:FUNCTION such as train.model:factory, a config.json, or "
            "torchtitan:MODEL/FLAVOUR such as torchtitan:llama3/8B"
        )
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"model = {name!r}: {module_name} cannot be imported: {error}") from None
    factory = getattr(module, function_name, None)
    if not callable(factory):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InputError(
            f"model = {name!r}: {module_name} has no function {function_name}; it has {', '.join(there) or 'none'}"
        )
    try:
        inspect.signature(factory).bind(0, 1)
    except TypeError as error:
        raise InputError(f"model = {name!r}: it is called with rank and ranks: {error}") from None
    return _checked(name, factory)


def _checked(name: str, factory: Callable[[int, int], Any]) -> Factory:
    def checked(rank: int, ranks: int) -> Setup:
        setup = factory(rank, ranks)
        if not isinstance(setup, Setup):
            raise InputError(
                f"model = {name!r}: it returned a {type(setup).__name__}, optpipe_runtime.Setup was expected"
            )
        return setup

    return checked
