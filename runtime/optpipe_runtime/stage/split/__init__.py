"""Split backward: the input gradient now (B), the weight gradient later (W).

`backward` has the split backward of one stage. Each way leaves jobs to the `queue` of a micro-batch, which W runs:

- `mode`: while `Splitting` is active it sees every call of torch, and hands ops with parameters to `layers` (linear
  layers and layer norms, a node each) or to `graph` (any other op, by its own graph);
- `hooked`: the same in less host time, by a `weight_hook`, for modules that `calls` has seen the stage call;
- `weight_grads`: for a user's own autograd function;
- `modules`: for modules with a queue of their own, as TransformerEngine's.

Every other parameter gets its gradient at B: those of other norms, parameters that are computed from others, an LSTM's,
and those of ops that stay in a compiled region. `layers` also keeps the casts of weights under autocast.
"""

from optpipe_runtime.stage.split.backward import SplitBackward
from optpipe_runtime.stage.split.mode import would_hold
from optpipe_runtime.stage.split.queue import WeightQueue, computed_at_once, main_grad, weight_grads

__all__ = [
    "SplitBackward",
    "WeightQueue",
    "computed_at_once",
    "main_grad",
    "weight_grads",
    "would_hold",
]
