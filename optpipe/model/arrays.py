"""The array types of the core, and the numbers that stand for something that is not there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]  # (n, 5) the columns of `optpipe.model.program`
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

NONE = -1  # no row, no device, no neighbour stage
OFF_ROUTE = -2  # instead of a neighbour: the stage is not on the route
UNLIMITED = 2**62  # bytes, where nothing limits them
