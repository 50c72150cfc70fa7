"""Optimizers on the host for stages of which each rank has a part."""

from __future__ import annotations

import numpy as np
import pytest
from support.close import require_close
from support.ranks import hosted_parts
from support.ranks.programs import SPLIT
from support.ranks.worker import Ranks


@pytest.mark.parametrize("max_norm", [0.0, 0.2])
def test_tensor_parallel_stages_are_updated_on_the_host_as_on_the_device(four_ranks: Ranks, max_norm: float) -> None:
    """To the bit; where they are clipped, to the rounding of the norm of all parts."""
    found, expected = (
        four_ranks(hosted_parts.trained, programs=SPLIT, hosted=hosted, max_norm=max_norm, steps=3)
        for hosted in (True, False)
    )
    for ran, on_device in zip(found, expected, strict=True):
        if ran.losses[0] is not None:
            np.testing.assert_allclose(ran.losses, on_device.losses, rtol=1e-5 if max_norm else 0)
        assert ran.norms == pytest.approx(on_device.norms, rel=1e-6)
        rtol, atol = (1e-4, 1e-5) if max_norm else (0, 0)
        require_close(ran.parameters, on_device.parameters, rtol, atol)
    if max_norm:
        norms, _ = hosted_parts.plain(max_norm, 3)
        assert min(norms) > max_norm, "each update is clipped"
        for ran in found:
            assert ran.norms == pytest.approx(norms, rel=1e-4)
