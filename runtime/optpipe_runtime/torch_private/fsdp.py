"""Private names of `fully_shard` (FSDP2).

FSDP reduces gradients in hooks of autograd, and weight gradients come outside of autograd. So its parameters, its
groups of them and its end of a backward are used here as FSDP itself uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


class ShardedParameter:
    """One of FSDP's parameters (`FSDPParam`)."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def shard(self) -> nn.Parameter:
        """This rank's part, a DTensor: what the module has between steps."""
        shard: nn.Parameter = self._inner.sharded_param
        return shard

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The type in which its gradient is reduced, if not its own."""
        dtype: torch.dtype | None = self._inner.reduce_dtype
        return dtype

    @property
    def name(self) -> str:
        """Within the outermost module of FSDP; known once this has run."""
        return str(self._inner._param_fqn)

    @property
    def whole(self) -> nn.Parameter | None:
        """The parameter that a step uses, with its gradient; None before it was first gathered."""
        return getattr(self._inner, "_unsharded_param", None)

    @property
    def gather_buffers(self) -> list[Tensor]:
        """Where it is gathered; empty storages while it is not."""
        buffers: list[Tensor] = self._inner.all_gather_outputs
        return buffers

    @property
    def aside(self) -> Tensor | None:
        """A whole gradient that FSDP has put aside in another type. Newer releases of torch put nothing aside."""
        return getattr(self._inner, "unsharded_accumulated_grad", None)

    @aside.setter
    def aside(self, gradient: Tensor | None) -> None:
        if "unsharded_accumulated_grad" in vars(self._inner):
            self._inner.unsharded_accumulated_grad = gradient

    def put_aside(self) -> None:
        """Lets FSDP change the type of a whole gradient, if it is to be reduced in another one."""
        self._inner.to_accumulated_grad_if_needed()

    @property
    def gradients(self) -> list[Tensor]:
        """The whole gradients: what backwards have added up, and what FSDP has put aside."""
        summed = None if self.whole is None else self.whole.grad
        return [gradient for gradient in (summed, self.aside) if gradient is not None]

    def forget_gradients(self) -> None:
        if self.whole is not None:
            self.whole.grad = None
        self.aside = None


class ParameterGroup:
    """Parameters that FSDP gathers and reduces in one collective (`FSDPParamGroup`)."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.parameters = [ShardedParameter(parameter) for parameter in inner.fsdp_params]

    @property
    def mesh(self) -> DeviceMesh:
        """Of the ranks over which the parameters are sharded or copied."""
        mesh: DeviceMesh = self._inner.mesh_info.mesh
        return mesh

    @property
    def gathering(self) -> Tensor | None:
        """The buffer of a gather under way."""
        result = self._inner._all_gather_result
        return None if result is None else result.all_gather_output

    def forget_gather(self) -> None:
        """Drops a gather that nobody waits for, after a failure."""
        self._inner._all_gather_result = None


def groups_of(part: FSDPModule) -> list[ParameterGroup]:
    return [ParameterGroup(group) for group in _state_groups(part._get_fsdp_state())]


def end_backward(root: FSDPModule) -> None:
    """What FSDP itself calls when a backward through an outermost module has ended: it reduces the gradients that it
    finds, and shards the parameters again."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def set_apart(roots: Iterable[FSDPModule]) -> Callable[[], None]:
    """Takes the whole gradients away from the parameters of outermost modules, so that later ops go on with these.
    Returns what reduces them, and adds the result to the gradients of the shards.

    FSDP reduces what it finds in its parameters when a backward ends, with its own types, factors and hooks, and then
    resets what its hooks note in forwards and backwards. So that it does neither to the modules in use, its end of a
    backward runs on shallow copies of what it notes. The copies own the gradients of now; shards are the modules' own.
    """
    copies = [_copy_state(root._get_fsdp_state()) for root in roots]

    def reduce() -> None:
        for root in copies:
            root._root_post_backward_final_callback()

    return reduce


def _state_groups(state: Any) -> list[Any]:
    """The parameter groups of a module's state: several, or in older releases of torch one or none."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if groups is None else groups


def _copy_state(root: Any) -> Any:
    """A copy of the state of an outermost module, with those of all modules inside."""
    context, communication = _copied(root._state_ctx), _copied(root._comm_ctx)
    context.is_last_backward = True
    states = {id(state): _copied(state) for state in root._state_ctx.all_states}
    for state in root._state_ctx.all_states:
        copied = states[id(state)]
        copied._state_ctx, copied._comm_ctx = context, communication
        _replace(copied, {id(group): _copy_group(group, communication) for group in _state_groups(state)})
    context.all_states = list(states.values())
    return states[id(root)]


def _copy_group(group: Any, communication: Any) -> Any:
    copied = _copied(group)
    copied.comm_ctx, copied.reduce_grads, copied.reshard_after_backward = communication, True, False
    _replace(copied, {id(parameter): _copy_parameter(parameter) for parameter in group.fsdp_params})
    return copied


def _copy_parameter(parameter: Any) -> Any:
    """A copy of one of FSDP's parameters, which takes its whole gradient over."""
    copied, whole = copy(parameter), parameter._unsharded_param
    copied._unsharded_param = SimpleNamespace(
        grad=whole.grad, requires_grad=whole.requires_grad, grad_dtype=getattr(whole, "grad_dtype", None)
    )
    ShardedParameter(parameter).forget_gradients()
    return copied


def _copied(thing: Any) -> Any:
    """A copy whose lists, sets and dictionaries are its own."""
    copied = copy(thing)
    vars(copied).update(
        {name: copy(value) for name, value in vars(thing).items() if isinstance(value, list | set | dict)}
    )
    return copied


def _replace(owner: Any, copies: dict[int, Any]) -> None:
    """Puts copies, by the identity of what they copy, into their owner's attributes and lists in them."""
    for name, value in vars(owner).items():
        if isinstance(value, list):
            vars(owner)[name] = [copies.get(id(item), item) for item in value]
        elif id(value) in copies:
            vars(owner)[name] = copies[id(value)]
