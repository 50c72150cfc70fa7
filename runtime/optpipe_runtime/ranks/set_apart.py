"""Whole gradients of `fully_shard`ed modules, set apart: FSDP reduces them while later ops go on with the modules.

FSDP reduces what it finds in its parameters when a backward ends, with its own types, factors and hooks, and then
resets what its hooks note in forwards and backwards. So that it does neither to the modules in use, its end of a
backward runs on shallow copies of what it notes. The copies own the gradients of now; shards are the modules' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from types import SimpleNamespace
from typing import Any


def set_apart(roots: Iterable[Any], groups_of: Callable[[Any], list[Any]]) -> Callable[[], None]:
    """Takes the whole gradients away from the parameters of FSDP's outermost modules, given by their states. Returns
    what reduces them, and adds the result to the gradients of the shards. `groups_of` gives a state's parameter
    groups."""
    copies = [_state(root, groups_of) for root in roots]

    def reduce() -> None:
        for root in copies:
            root._root_post_backward_final_callback()

    return reduce


def _state(root: Any, groups_of: Callable[[Any], list[Any]]) -> Any:
    """A copy of the state of an outermost module, with those of all modules inside."""
    context, communication = _copied(root._state_ctx), _copied(root._comm_ctx)
    context.is_last_backward = True
    states = {id(state): _copied(state) for state in root._state_ctx.all_states}
    for state in root._state_ctx.all_states:
        own = states[id(state)]
        own._state_ctx, own._comm_ctx = context, communication
        _replace(own, {id(group): _group(group, communication) for group in groups_of(state)})
    context.all_states = list(states.values())
    return states[id(root)]


def _group(group: Any, communication: Any) -> Any:
    own = _copied(group)
    own.comm_ctx, own.reduce_grads, own.reshard_after_backward = communication, True, False
    _replace(own, {id(parameter): _parameter(parameter) for parameter in group.fsdp_params})
    return own


def _parameter(parameter: Any) -> Any:
    """A copy of one of FSDP's parameters, which takes its whole gradient over."""
    own, whole = copy(parameter), parameter._unsharded_param
    own._unsharded_param = SimpleNamespace(
        grad=whole.grad, requires_grad=whole.requires_grad, grad_dtype=getattr(whole, "grad_dtype", None)
    )
    whole.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # newer releases of torch put nothing aside
        parameter.unsharded_accumulated_grad = None
    return own


def _copied(thing: Any) -> Any:
    """A copy whose lists, sets and dictionaries are its own."""
    own = copy(thing)
    vars(own).update({name: copy(value) for name, value in vars(thing).items() if isinstance(value, list | set | dict)})
    return own


def _replace(owner: Any, copies: dict[int, Any]) -> None:
    """Puts copies into the attributes of their owner, also within lists. `copies` are by the identity of what they
    copy."""
    for name, value in vars(owner).items():
        if isinstance(value, list):
            vars(owner)[name] = [copies.get(id(item), item) for item in value]
        elif id(value) in copies:
            vars(owner)[name] = copies[id(value)]
