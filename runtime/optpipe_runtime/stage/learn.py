"""`learn`: finds out what a stage gets and gives, by running its forward twice and forgetting it."""

from __future__ import annotations

from dataclasses import replace

import torch

from optpipe.errors import InputError
from optpipe_runtime.memory import buffers
from optpipe_runtime.memory.host_pool import Nowhere
from optpipe_runtime.stage.entrance import reached_inputs
from optpipe_runtime.stage.io import Spec, StageIO, Tensors
from optpipe_runtime.stage.runner import StageRunner, clones
from optpipe_runtime.stage.split import would_hold


def learn(
    stage: StageRunner, inputs: Tensors, target: Tensors | None = None, route: int = 0, begins: bool = False
) -> StageIO:
    """Fills in the stage's `io` on a route, and returns it. All outputs that require a gradient count as needed.

    Parameters
    ----------
    inputs
        Of one micro-batch.
    target
        Of one micro-batch, where the route ends here; else None.
    begins
        Whether the route begins here: the inputs are then the batch.
    """
    io = StageIO(tuple(Spec.of(tensor) for tensor in inputs), begins, ends=target is not None)
    stage.at_b = None
    if route <= min(stage.io, default=route):  # a route learned before decides for all
        stage.norms_wait = True
    with stage.replay.undisturbed(), torch.enable_grad():
        copies, asked, changed = clones(inputs), clones(target or ()), buffers.watch(stage.module)
        outputs = stage.outputs(io, copies, asked)
        if io.ends and not outputs[0].requires_grad:
            raise InputError(
                "the loss requires no gradient: loss_fn must compute it, by torch, from the output of the last stage"
            )
        stage.replay.changing = list(dict.fromkeys((*stage.replay.changing, *changed())))
    stage.io[route] = io = replace(
        io,
        outputs=tuple(Spec.of(output) for output in outputs),
        reached=tuple(reached_inputs(output, inputs) for output in outputs),
        needed=tuple(k for k, output in enumerate(outputs) if output.requires_grad),
        changes_inputs=any(tensor._version for tensor in (*copies, *asked)),
    )
    del outputs
    with stage.replay.undisturbed():
        stage.io[route] = _with_blocks(stage, io, inputs, clones(target or ()), route)
    return stage.io[route]


def _with_blocks(stage: StageRunner, io: StageIO, inputs: Tensors, target: Tensors, route: int) -> StageIO:
    """Adds the sizes of the blocks that a forward saves, and which of them a drop does not free."""
    batch = clones(inputs) if io.begins else ()
    stage.start_step((*batch, *target), 1)
    stage.forward(0, batch or tuple(tensor.detach().clone() for tensor in inputs), target, route=route)
    running = stage.forget(0)  # its graph lives until the end of this function
    activation = running.activation
    if stage.norms_wait and would_hold(running.edges.values()) > activation.nbytes:
        # W gains least by the products of layer norms, and a B should not need more memory than its F.
        stage.norms_wait = False
    activation.offload(0, 1, Nowhere())
    activation.drop(0)
    stage.end_step()
    shared = activation.shared_blocks()
    return replace(
        io,
        shared_blocks=shared,
        block_bytes=tuple(0 if i in shared else n for i, n in enumerate(activation.sizes())),
    )
