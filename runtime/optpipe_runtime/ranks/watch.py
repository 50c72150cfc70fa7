"""A thread that watches over a team whose messages run on GPUs.

On NCCL nobody who waits for a failed rank gets an error: the GPU waits in a kernel that never ends. So a thread of each
rank looks into the store of torch.distributed for the reason that a failed rank has written, and whether the next
rank's thread still counts. If not, it ends the team (`Team.fail`), which aborts the communicators, and with them the
kernels. Two things follow from how NCCL aborts:

- It frees memory, which waits for all kernels on the device, those of other communicators, too. So all are aborted at
  the same time, each in a thread of its own (`all_at_once`).
- What is aborted ends without an error, with garbage in its buffers. So whoever has waited for an event asks whether
  the team has failed, and not the event (`wait_for` of `optpipe_runtime.memory.clock`).

torch's own watchdog ends the process instead. It gets a longer timeout (`GRACE_S`), so that this thread comes first.
Tested on CPU with real ranks and events that never come; not measured on NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from optpipe_runtime.torch_private.groups import Store

LOOK_S = 1.0
GRACE_S = 30.0
END_S = 5.0  # a store that hangs holds up nobody longer


class Watch:
    """Starts the thread of a rank of the team, which watches the next one. It ends at `stop`, or when it has called
    `fail` with a reason, such as that the next rank's count has stood still for `timeout_s`. `store` is a copy for this
    thread alone: a store serves one caller at a time, and may keep it waiting."""

    def __init__(
        self, rank: int, names: Sequence[str], store: Store, timeout_s: float, fail: Callable[[str], object]
    ) -> None:
        self._rank, self._next, self._store = rank, (rank + 1) % len(names), store
        self._name, self._next_name = names[self._rank], names[self._next]
        self._timeout_s, self._fail = timeout_s, fail
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="optpipe-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which tells the rank that watches this one not to miss it."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def _watch(self) -> None:
        try:
            why = self._look()
        except RuntimeError:  # torch's DistError
            why = f"rank {self._name} lost its connection to the store of torch.distributed"
        if why is not None and not self._stopped.is_set():
            self._fail(why)

    def _look(self) -> str | None:
        """Why the team has failed, when it has; None after `stop`."""
        seen, since = 0, time.monotonic()
        while not self._stopped.wait(LOOK_S):
            if self._store.check(["why"]):
                return str(self._store.get("why"), "utf-8")
            self._store.add(f"count/{self._rank}", 1)
            count = self._store.add(f"count/{self._next}", 0)
            if count != seen:
                seen, since = count, time.monotonic()
            elif time.monotonic() - since > self._timeout_s and not self._store.check([f"ended/{self._next}"]):
                waited = f"rank {self._name} has waited {self._timeout_s:g} s"
                return f"rank {self._next_name} did not answer any more; {waited}"
        self._store.set(f"ended/{self._rank}", "")
        return None


def all_at_once(calls: Sequence[Callable[[], object]], seconds: float) -> None:
    """Makes every call in a thread of its own, and waits until all have returned, at most for so long."""
    threads = [threading.Thread(target=call, name="optpipe-abort", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
