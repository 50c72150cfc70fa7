"""Gradients in which more than one rank has a part: of tied parameters (`Tie`), and of the whole model, whose norm
`clip` limits. The norm counts every parameter once.

Of inner peers the first one counts. A DTensor has the same norm on all of them, which is that of all its parts, and a
plain parameter the same gradient. Only one marked as Megatron-LM marks its parts, by the attribute
`tensor_model_parallel`, is another parameter on each peer. A plain one whose attribute `part_of` is a DTensor (a copy
on the host) counts as this DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from optpipe.errors import InputError
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.torch_private.tensors import local

# The parameters whose gradients make the norm, by name, and those of them that another rank counts.
Counted = tuple[Mapping[str, nn.Parameter], Iterable[nn.Parameter]]
EQUAL = 1e-3  # how far norms of equal gradients may lie apart, as a share: sums on a GPU come in any order


class Tie:
    """Copies that start equal and get the sum of their gradients after every step, so that equal optimizers keep them
    equal. Every method is collective.

    A module is tied by its parameters, in their order. DTensors, which must be sharded in the same way on all copies,
    are tied part by part: `fully_shard`'s on each replica, others on each inner peer. `uncounted` are the parameters
    here that a lower rank has, too: the norm of all gradients counts them there.
    """

    def __init__(self, copy: nn.Parameter | nn.Module | None, cpu_group: CpuGroup, team: Team) -> None:
        tied = list(copy.parameters()) if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        alike = [(tuple(p.shape), p.dtype, p.requires_grad, str(getattr(p, "placements", ""))) for p in tied]
        kind = "cuda" if any(parameter.is_cuda for parameter in tied) else "cpu"
        answers = cpu_group.gather_by_peer(None if copy is None else (alike, kind))[team.peer]
        holders = [rank for rank, answer in enumerate(answers) if answer is not None]
        if not holders:
            raise InputError("tie: every rank passed None, so there is nothing to tie")
        for rank in holders[1:]:
            if answers[rank][0] != answers[holders[0]][0]:
                shapes = [[list(shape) for shape, *_ in answers[r][0]] for r in (holders[0], rank)]
                raise InputError(
                    f"tie: ranks {holders[0]} and {rank} hold copies of shapes {shapes[0]} and {shapes[1]}: they "
                    "must be alike, in type, in what is trained and in how they are sharded, too"
                )
        self.uncounted = tied if team.number in holders[1:] else []
        self._trained: list[nn.Parameter] = []
        self._before: list[Tensor | None] = []
        if len(holders) > 1:
            self._group = team.subgroup(holders, torch.device(answers[holders[0]][1]))
            self._trained = [parameter for parameter in tied if parameter.requires_grad]
            for parameter in tied:
                self._group.broadcast(local(parameter.data), holders[0])

    def start_step(self) -> None:
        """Sets the gradients of earlier steps aside: only this step's are summed over the copies. They are cloned,
        because DistributedDataParallel writes this step's gradients into its buckets, where the earlier ones may be."""
        self._before = [None if parameter.grad is None else parameter.grad.clone() for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def end_step(self) -> None:
        grads = [placed(parameter) for parameter in self._trained]
        for reduction in [self._group.all_reduce(local(grad)) for grad in grads]:
            reduction.wait()
        for parameter, grad, before in zip(self._trained, grads, self._before, strict=True):
            parameter.grad = grad if before is None else grad.add_(before)
        self._before = []


def placed(parameter: Any) -> Any:
    """The parameter's gradient, zeros if it has none, spread over ranks as the parameter is: backwards may leave it in
    another way. Collective over the ranks of a DTensor whose gradient is."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.redistribute(placements=parameter.placements) if isinstance(gradient, DTensor) else gradient


def clip(
    parameters: Mapping[str, nn.Parameter],
    uncounted: Iterable[nn.Parameter],
    cpu_group: CpuGroup,
    max_norm: float,
    norm_type: float,
) -> float:
    """Collective: see `Pipeline.clip_grad_norm_`. `uncounted` are tied copies that another rank counts. As in torch, a
    gradient that is not finite makes all gradients NaN."""
    total = total_norm(cpu_group.gather(own_norm(parameters, uncounted, cpu_group, norm_type)), norm_type)
    scale(parameters.values(), total, max_norm)
    return float(total)


def own_norm(
    parameters: Mapping[str, nn.Parameter],
    uncounted: Iterable[nn.Parameter],
    cpu_group: CpuGroup,
    norm_type: float = 2.0,
) -> float:
    """The norm of the gradients that this rank counts: those here, without those that another rank counts. Collective
    if there are inner peers: a DTensor's norm is computed by all of its ranks, and `InputError` is raised if a plain
    parameter has other gradients on other peers."""
    elsewhere = set(map(id, uncounted))
    names = {parameter: name for name, parameter in parameters.items() if id(parameter) not in elsewhere}
    counted = _trained(names)
    if cpu_group.peers > 1:
        plain = [p for p in counted if _is_plain(p) and not _is_part(p)]
        each = {names[p]: (norm_of([p], norm_type), max(EQUAL, 2 * torch.finfo(p.dtype).eps)) for p in plain}
        for on_peers in zip(*cpu_group.gather_by_peer(each), strict=True):
            for name in dict.fromkeys(name for figures in on_peers for name in figures):
                found, tolerances = zip(*(figures.get(name, (0.0, EQUAL)) for figures in on_peers), strict=True)
                if all(map(math.isfinite, found)) and max(found) - min(found) > max(tolerances) * max(found):
                    raise InputError(
                        f"{name} has gradients of norms {', '.join(f'{norm:.3g}' for norm in found)} on its inner "
                        "peers: average them over the peers, or, if each has a part of the parameter, make it a "
                        "DTensor or set its attribute tensor_model_parallel to True"
                    )
    whole, parts = ([p for p in counted if _is_part(p) == part] for part in (False, True))
    common, apart = ([norm_of(kind, norm_type) for kind in _kinds(some)] for some in (whole, parts))
    norms = apart if cpu_group.peer else [*common, *apart]
    return norms[0] if len(norms) == 1 else float(total_norm(norms, norm_type))


def total_norm(norms: Sequence[float], norm_type: float = 2.0) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.tensor(norms or [0.0], dtype=torch.float64), norm_type)
    return total


def scale(parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Clips the gradients by the norm of those of the whole model."""
    for kind in _kinds(_trained(parameters)):
        double = any(parameter.dtype == torch.float64 for parameter in kind)
        # torch 2.11 takes many gradients at a time, and then leaves those that are yet to be summed as they are.
        # Such is what sequence parallelism leaves: each rank has a term of the gradient.
        placements = [place for p in kind if isinstance(p.grad, DTensor) for place in p.grad.placements]
        foreach = False if any(place.is_partial() for place in placements) else None
        clip_grads_with_norm_(kind, max_norm, total if double else total.to(torch.float32), foreach)


def exceeds(total: Tensor, max_norm: float) -> bool:
    """Whether `scale` would change a gradient: torch adds a little to the norm."""
    return any(float(max_norm / (norm + 1e-6)) < 1 for norm in (total, total.to(torch.float32)))


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those with a gradient, each once."""
    return [parameter for parameter in dict.fromkeys(parameters) if parameter.grad is not None]


def _is_part(parameter: nn.Parameter) -> bool:
    """Whether each inner peer has another part of a plain parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False)) and _is_plain(parameter)


def norm_of(parameters: list[nn.Parameter], norm_type: float) -> float:
    """The norm of the gradients of parameters that `_kinds` puts together. Collective over the ranks of DTensors."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = getattr(parameters[0], "part_of", None) if parameters else None
    if not isinstance(whole, DTensor):
        norm: Tensor = get_total_norm(grads, norm_type)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    # This rank has parts of the gradients, spread as `whole` is, and of one perhaps no number.
    norm = get_total_norm([grad for grad in grads if grad.numel()], norm_type).double()
    largest = norm_type == math.inf
    total = (norm if largest else norm**norm_type).to(whole.device_mesh.device_type)
    for dimension, place in enumerate(whole.placements):
        if not place.is_replicate():
            how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(total, how, group=whole.device_mesh.get_group(dimension))
    return float(total if largest else total ** (1 / norm_type))


def _kinds(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups plain parameters, those of each mesh, and parts spread alike: torch takes one kind at a time."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            key: Any = parameter.device_mesh
        elif isinstance(whole := getattr(parameter, "part_of", None), DTensor):
            key = whole.device_mesh, whole.placements
        else:
            key = None
        kinds.setdefault(key, []).append(parameter)
    return list(kinds.values())


def _is_plain(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) and getattr(parameter, "part_of", None) is None
