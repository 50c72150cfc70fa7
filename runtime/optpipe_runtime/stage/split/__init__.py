"""Split backward: the input gradient now (B), the weight gradient later (W).

`layers` splits linear, embedding and norms, `graph` the other products with parameters, both under the mode
`Splitting`. `hooked` does the first in less host time, for modules that a stage is known to call. A user's own autograd
function returns its `weight_grads`. `modules` is for modules with a queue of their own, as TransformerEngine's. Every
other parameter gets its gradient at B: those of other norms, parameters that are computed from others, an LSTM's, and
all within a compiled module.
"""

from optpipe_runtime.stage.split.casts import Casts
from optpipe_runtime.stage.split.hooked import Calls, Hooked
from optpipe_runtime.stage.split.mode import Splitting, would_hold
from optpipe_runtime.stage.split.modules import Delayed, delaying, register_split
from optpipe_runtime.stage.split.queue import WeightQueue, accumulated, computed_at_once, weight_grads

__all__ = [
    "Calls",
    "Casts",
    "Delayed",
    "Hooked",
    "Splitting",
    "WeightQueue",
    "accumulated",
    "computed_at_once",
    "delaying",
    "register_split",
    "weight_grads",
    "would_hold",
]
