"""On what a rank computes: where its parameters are, or where the others' are."""

from __future__ import annotations

import pytest
import torch

from optpipe.errors import InputError
from optpipe_runtime.given import one_kind


def test_a_rank_without_parameters_computes_where_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert one_kind(None, [None, "cuda", "cuda"]) == torch.device("cuda", 3)
    assert one_kind(None, [None, "cpu"]) == one_kind(None, [None]) == torch.device("cpu")
    assert one_kind(torch.device("cuda", 1), [None, "cuda"]) == torch.device("cuda", 1)


def test_ranks_on_different_kinds_of_devices_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"^stages are on cpu and cuda, by rank \['cpu', None, 'cuda'\]: all ranks compute on the same kind",
    ):
        one_kind(torch.device("cpu"), ["cpu", None, "cuda"])
