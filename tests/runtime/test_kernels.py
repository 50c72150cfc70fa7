"""Parameters from kernels: those of a GPU whose kernels take what the formulas say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optpipe.transformer.calibrate import NAMES, covariance
from optpipe.transformer.presets import GPUS
from optpipe_runtime.measure import kernels

SIZES = kernels.Sizes((64, 128), (16, 64, 256), (2**18, 2**20), (64,), launches=1, repeats=1)


def test_the_parameters_of_a_gpu_are_found_from_its_kernels(monkeypatch):
    hidden = {"matmul_fraction": 0.02, "matmul_depth": 50.0, "memory_fraction": 0.1, "attention_fraction": 0.03}
    truth = GPUS["A100"].model_copy(update=hidden | {"host_us": 7.0})
    observed = kernels._observations

    def as_formulas_say(*arguments):
        for each in observed(*arguments):
            yield each._replace(measured_ms=each.predict(truth))

    monkeypatch.setattr(kernels, "_observations", as_formulas_say)
    learned = kernels.measure(GPUS["A100"], torch.device("cpu"), SIZES)
    for name, value in (hidden | {"host_us": 7.0}).items():
        assert getattr(learned, name) == pytest.approx(value, rel=0.02)
    spread = dict(zip(NAMES, np.sqrt(np.diag(covariance(learned))), strict=True))
    assert learned.link_fraction == GPUS["A100"].link_fraction
    assert spread["link_fraction"] == pytest.approx(0.25)  # as it was: no kernel uses a link
    assert 0.05 <= spread["host_us"] < 0.2
