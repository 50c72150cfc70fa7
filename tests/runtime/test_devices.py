"""The device that a rank computes on: that of its parameters, or that of the other ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.cases import batch, loss_fn, own_stages
from support.ranks.worker import Ranks
from torch import nn

from optpipe.errors import InputError
from optpipe_runtime import Pipeline
from optpipe_runtime.pipeline.build import compute_device, require_no_cuda_graphs


def test_a_rank_without_parameters_computes_on_the_device_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert compute_device(None, [None, "cuda", "cuda"]) == torch.device("cuda", 3)
    assert compute_device(None, [None, "cpu"]) == compute_device(None, [None]) == torch.device("cpu")
    assert compute_device(torch.device("cuda", 1), [None, "cuda"]) == torch.device("cuda", 1)


def test_ranks_on_different_kinds_of_devices_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"^stages are on cpu and cuda, by rank \['cpu', None, 'cuda'\]: all ranks must compute on the same kind",
    ):
        compute_device(torch.device("cpu"), ["cpu", None, "cuda"])


CUDA = torch.device("cuda", 0)


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(**options)
    return module


def graphed(module: nn.Module) -> nn.Module:
    """As `make_graphed_callables` leaves a module, which needs a GPU."""
    forward = module.forward

    def new_fwd(*arguments: Any) -> Any:
        return forward(*arguments)

    new_fwd.__module__ = "torch.cuda.graphs"
    module.forward = new_fwd  # type: ignore[method-assign]
    return module


CAPTURED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "reduce-overhead": lambda module: torch.compile(module, mode="reduce-overhead"),
    "max-autotune": lambda module: torch.compile(module, mode="max-autotune"),
    "an option": lambda module: torch.compile(module, options={"triton.cudagraphs": True}),
    "in place": lambda module: in_place(module, mode="reduce-overhead"),
    "graphed": graphed,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # where inductor is imported
@pytest.mark.parametrize("how", CAPTURED)
def test_stages_that_run_as_cuda_graphs_are_refused(how: str) -> None:
    """On CPU, where the same modes capture nothing, they are not."""
    stage = nn.Sequential(nn.Tanh(), CAPTURED[how](nn.Linear(2, 2)))
    with pytest.raises(
        InputError, match=r"^stage 3: 1 .*: what a CUDA graph saves cannot be freed or offloaded; compile with mode"
    ):
        require_no_cuda_graphs({3: stage}, CUDA)
    require_no_cuda_graphs({3: stage}, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stages_compiled_without_cuda_graphs_are_not_refused() -> None:
    for options in ({}, {"mode": "max-autotune-no-cudagraphs"}, {"backend": "aot_eager"}):
        for compiled in (torch.compile(nn.Linear(2, 2), **options), in_place(nn.Linear(2, 2), **options)):
            require_no_cuda_graphs({0: compiled}, CUDA)


def transfer_mode(full_duplex: bool | None) -> str:
    with Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 2, full_duplex=full_duplex) as pipe:
        return pipe.profile(*batch(0, 2), activation_budget_bytes=10**9, repeats=1).transfer_mode


@pytest.mark.parametrize("given", [None, False, True])
def test_the_profile_tells_the_default(ranks: Ranks, given: bool | None) -> None:
    mode = "full_duplex" if given else "half_duplex"
    assert ranks(transfer_mode, full_duplex=given) == [mode] * 2
