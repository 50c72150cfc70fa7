"""The device that a rank computes on: that of its parameters, or that of the other ranks."""

from __future__ import annotations

import pytest
import torch

from optpipe.errors import InputError
from optpipe_runtime.arguments import compute_device


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
