"""`learn`: finds out what a stage gets and gives, by running its forward three times and forgetting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import Activation
from optpipe_runtime.memory.host_pool import Nowhere
from optpipe_runtime.stage.forwards import Arguments, Running
from optpipe_runtime.stage.io import Spec, StageIO, Tensors, clones, reached_inputs, tensors_in
from optpipe_runtime.stage.outside import leaves_of
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.torch_private.modules import must_stay_whole
from optpipe_runtime.torch_private.tensors import version

_NONE: Mapping[str, Any] = MappingProxyType({})


def learn(
    stage: StageRunner,
    inputs: Tensors,
    target: Tensors | None = None,
    form: int = 0,
    begins: bool = False,
    kwargs: Mapping[str, Any] = _NONE,
    anew: bool = True,
) -> StageIO:
    """Fills in the stage's `io` of a form, and returns it. All outputs that require a gradient count as needed.

    Parameters
    ----------
    inputs
        Of one micro-batch.
    target
        Of one micro-batch, where its route ends here; else None.
    begins
        Whether its route begins here: the inputs are then the batch, and may be other values than tensors.
    kwargs
        What the module gets by name, of one micro-batch.
    anew
        Whether all else of the stage is learned, too: which calls it makes. Other forms only add theirs.
    """
    io = StageIO(tuple(Spec.from_tensor(tensor) for tensor in tensors_in(inputs)), begins, ends=target is not None)
    if anew:
        stage.split.learn_anew(stage.module)
    arguments = Arguments(inputs, target or (), dict(kwargs))
    try:
        io, leaves = _run_noting(stage, io, arguments)
    except Exception as error:
        if not must_stay_whole(error):
            raise
        stage.split.whole = True
        io, leaves = _run_noting(stage, io, arguments)
    stage.outside.note(leaves)
    stage.io[form] = io
    stage.io[form] = _with_blocks(stage, io, arguments, form)
    return stage.io[form]


def _run_noting(stage: StageRunner, io: StageIO, arguments: Arguments) -> tuple[StageIO, list[ReferenceType[Tensor]]]:
    """A forward of torch's own: notes the stage's calls, and adds what it gives. Returns the leaves of its graph, too,
    without inputs and the module's parameters."""
    assert stage.split.calls is not None
    with stage.replay.undisturbed(), torch.enable_grad(), stage.split.calls.noting(stage.split.whole):
        copies = clones(arguments)
        outputs = stage.forwards.outputs(io, copies)
        if io.ends and not outputs[0].requires_grad:
            raise InputError(
                "the loss requires no gradient: loss_fn must compute it, by torch, from the output of the last stage"
            )
        leaves = leaves_of(outputs, (*tensors_in(arguments), *stage.module.parameters()))
    io = replace(
        io,
        outputs=tuple(Spec.from_tensor(output) for output in outputs),
        reached=tuple(reached_inputs(output, tensors_in(arguments.inputs)) for output in outputs),
        needed=tuple(k for k, output in enumerate(outputs) if output.requires_grad),
        changes_inputs=any(version(tensor) for tensor in tensors_in(copies)),
    )
    return io, leaves


def _with_blocks(stage: StageRunner, io: StageIO, arguments: Arguments, form: int) -> StageIO:
    """Adds the sizes of the blocks that a forward saves, which of them a drop does not free, and whether torch's own
    graph saves as little."""
    assert stage.split.calls is not None
    running, activation = _run(stage, arguments, form)  # the graph lives as long as `running`
    nbytes = activation.nbytes
    if stage.split.norms_wait and stage.split.calls.would_hold > nbytes:
        # W gains least by the products of layer norms, and a B should not need more memory than its F.
        stage.split.norms_wait = False
    activation.offload(0, 1, Nowhere())
    activation.drop(0)
    stage.end_step()
    shared = activation.shared_blocks()
    io = replace(
        io,
        saved_outputs=running.saved_outputs,
        shared_blocks=shared,
        block_bytes=tuple(0 if i in shared else n for i, n in enumerate(activation.sizes())),
        as_torch=True,
    )
    del running, activation
    stage.io[form] = io
    _, activation = _run(stage, arguments, form, Kind.BW)
    stage.end_step()
    return replace(io, as_torch=activation.nbytes <= nbytes)


def _run(
    stage: StageRunner, arguments: Arguments, form: int, backward: Kind | None = None
) -> tuple[Running, Activation]:
    """Runs a forward for which this backward op is known to come, and forgets it."""
    with stage.replay.undisturbed():
        batch, target, named = clones(arguments if stage.io[form].begins else arguments._replace(inputs=()))
        stage.start_step(tensors_in((batch, target, named)), 1)
        inputs = batch if stage.io[form].begins else tuple(tensor.detach().clone() for tensor in arguments.inputs)
        stage.forward(0, inputs, target, form=form, backward=backward, kwargs=named)
        running = stage.forget(0)
        return running, running.activation
