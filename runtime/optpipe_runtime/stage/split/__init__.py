"""Split backward: the input gradient now (B), the weight gradient later (W).

`layers` splits linear, embedding and norms, `graph` the other products with parameters, both under the mode
`Splitting`. `hooked` does the first in less host time, for modules that a stage is known to call. A user's own autograd
function returns its `weight_grads`. `modules` is for modules with a queue of their own, as TransformerEngine's. Every
other parameter gets its gradient at B: those of other norms, parameters that are computed from others, an LSTM's, and
those of ops that stay in a compiled region.
"""

from optpipe_runtime.stage.split.calls import Calls
from optpipe_runtime.stage.split.casts import Casts
from optpipe_runtime.stage.split.mode import Splitting, would_hold
from optpipe_runtime.stage.split.modules import Delayed, delaying
from optpipe_runtime.stage.split.queue import (
    WeightQueue,
    accumulated,
    added_at_once,
    computed_at_once,
    main_grad,
    weight_grads,
)

__all__ = [
    "Calls",
    "Casts",
    "Delayed",
    "Splitting",
    "WeightQueue",
    "accumulated",
    "added_at_once",
    "computed_at_once",
    "delaying",
    "main_grad",
    "weight_grads",
    "would_hold",
]
