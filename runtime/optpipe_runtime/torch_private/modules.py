"""Private names of nn.Module and torch.compile."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters. An attribute takes longer to read, and may hide one of them."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own buffers. torch can set them by name, but not put another tensor in their place."""
    return module._buffers


def is_wrapped(module: nn.Module) -> bool:
    """Whether a call of this object does more than its class's forward: hooks, or a forward of its own."""
    return bool(module._forward_pre_hooks or module._forward_hooks) or "forward" in vars(module)


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` has put in the place of its call; None if it was not compiled in place."""
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was given this module, in place or as a module around it."""
    return compiled_call(module) is not None or hasattr(module, "_orig_mod")


def must_stay_whole(error: Exception) -> bool:
    """Whether a region was compiled with fullgraph=True and was to end in the middle. Loads no compiler."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.Unsupported)
