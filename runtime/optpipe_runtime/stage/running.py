"""`Running`: a micro-batch of one stage between its F and its last backward op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import Activation
from optpipe_runtime.stage.io import StageIO, Tensors
from optpipe_runtime.stage.split import WeightQueue


class Given(NamedTuple):
    """What a forward gets: from the stage before or the batch, where the route ends for the loss, and by name."""

    inputs: Tensors
    target: Tensors
    kwargs: Mapping[str, Any]


@dataclass
class Running:
    """What a stage has of a micro-batch.

    Attributes
    ----------
    activation
        What autograd has saved; with a C to come, the inputs.
    queue
        What B leaves to W.
    edges
        Where the backward enters the graph, by number of the output.
    input_gradients
        What the backward has computed for the inputs, by number. A list of none or one.
    again
        Runs the forward once more, for C.
    backward
        The op that will come, B or BW; None if that is not known.
    captured
        Whether `activation` counts and moves what autograd saves.
    saved_outputs
        The numbers of the outputs that share memory with what is saved.
    stand_ins
        Copies of buffers that C has used in their places. Like buffers they are no activations.
    """

    io: StageIO
    activation: Activation
    queue: WeightQueue = field(default_factory=WeightQueue)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    input_gradients: list[dict[int, Tensor | None]] = field(default_factory=list)
    again: Callable[[], None] | None = None
    backward: Kind | None = None
    captured: bool = True
    saved_outputs: frozenset[int] = frozenset()
    stand_ins: Sequence[Tensor] = ()
