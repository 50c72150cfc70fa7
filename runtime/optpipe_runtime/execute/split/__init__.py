"""Split backward: the input gradient now (B), the weight gradient later (W).

`layers` does so for linear, embedding and layer norm, `graph` for the other products with parameters, both under the
mode `Splitting`; an autograd function of one's own returns its `weight_grads`; `modules` is for modules with a queue of
their own, as TransformerEngine's. Every other parameter gets its gradient at B: norms' scales, what is computed of
parameters, an LSTM's, and all within a compiled module.
"""

from optpipe_runtime.execute.split.mode import Splitting, would_hold
from optpipe_runtime.execute.split.modules import Delayed, delaying, register_split
from optpipe_runtime.execute.split.queue import WeightQueue, accumulated, weight_grads

__all__ = [
    "Delayed",
    "Splitting",
    "WeightQueue",
    "accumulated",
    "delaying",
    "register_split",
    "weight_grads",
    "would_hold",
]
