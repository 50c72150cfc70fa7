"""A device's link to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from optpipe.model.ops import Op
from optpipe_runtime.lowering.link_order import LinkOrder
from optpipe_runtime.memory.engines import CopyEngine, copy_engine
from optpipe_runtime.memory.shared_link import ChannelToken


class Link:
    """A device's link to the host: one channel if it is half duplex, one for each direction if it is full duplex. If
    ranks share the link, `tokens` has one token for each channel."""

    def __init__(self, device: torch.device, full_duplex: bool, tokens: Sequence[ChannelToken] = ()) -> None:
        self.out = copy_engine(device)
        self.back = copy_engine(device) if full_duplex else self.out
        self._shared = tuple(zip(tokens, self._channels, strict=True)) if tokens else ()

    @property
    def _channels(self) -> tuple[CopyEngine, ...]:
        return (self.out,) if self.back is self.out else (self.out, self.back)

    def start_step(self, orders: Sequence[LinkOrder | None]) -> None:
        """`orders` are the transfers of this step, channel by channel."""
        for (token, channel), order in zip(self._shared, orders, strict=True):
            if order is not None:
                token.start_step(order, channel)

    @contextmanager
    def in_order(self, op: Op) -> Iterator[None]:
        """What `op` transfers in this context crosses a shared link in the schedule's order."""
        with ExitStack() as stack:
            for token, channel in self._shared:
                stack.enter_context(token.in_order(op, channel))
            yield

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
