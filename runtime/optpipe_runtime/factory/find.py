"""`find_factory`: what a user's word for a model means."""

from __future__ import annotations

from optpipe.errors import InputError
from optpipe_runtime.factory.function import of_function
from optpipe_runtime.factory.huggingface import of_config
from optpipe_runtime.factory.setup import Factory, Sizes
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
    return of_function(model)
