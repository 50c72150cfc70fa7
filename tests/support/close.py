"""Compares arrays by name, such as gradients and parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]


def require_close(found: Arrays, expected: Arrays, rtol: float = 1e-4, atol: float = 1e-7) -> None:
    """Both have the same names. For equality to the bit, `np.testing.assert_equal` compares whole dictionaries."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol, err_msg=name)


def joined(by_rank: Iterable[Arrays]) -> dict[str, Any]:
    """What the ranks have, as one."""
    return {name: value for arrays in by_rank for name, value in arrays.items()}
