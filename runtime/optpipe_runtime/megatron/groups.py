"""Megatron's process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


def process_groups() -> Any:
    """Megatron's process groups, as its own functions collect them."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def inner_group(groups: Any) -> dist.ProcessGroup | None:
    """The ranks that compute the same stages together."""
    if groups.tp.size() == groups.cp.size() == 1:
        return None
    if 1 in (groups.tp.size(), groups.cp.size()):
        group: dist.ProcessGroup = max(groups.tp, groups.cp, key=lambda group: group.size())
        return group
    both: dist.ProcessGroup = parallel_state.get_tensor_and_context_parallel_group()
    return both
