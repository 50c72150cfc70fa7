"""How long it takes to send something: over links of a node, over the network, over the link to the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from optpipe.transformer.gpu import Gpu
from optpipe.transformer.records import Parallelism
from optpipe.transformer.work import Collective

MS, US = 1000, 1e-3  # ms of a second and of a microsecond


@dataclass(frozen=True)
class Links:
    """The links of one GPU, and which GPUs are at their other ends. Sizes in bytes."""

    gpu: Gpu
    parallelism: Parallelism

    def message_ms(self, nbytes: float) -> float:
        """Time of an activation between stages; they are on other nodes unless one node has all GPUs.

        What all GPUs of a tensor-parallel group have is sent in parts, one by each, and gathered (Narayanan et al.
        2021, section 4.1).
        """
        t = self.parallelism.tp // self.parallelism.along_sequence
        return self.transfer_ms(nbytes / t) + self.ring_ms((t - 1) / t * nbytes, t, 1, t - 1)

    def transfer_ms(self, nbytes: float) -> float:
        """Time of so many bytes from a GPU of one stage to one of the next."""
        p = self.parallelism
        return self.ring_ms(nbytes, 2, p.gpus / 2, 1) if p.pp > 1 else 0.0

    def collectives_ms(self, collectives: Iterable[Collective], over: str | None = None) -> float:
        """Time of collectives within a stage; of those over one dimension if that is named."""
        p = self.parallelism
        groups = {"tensor": (p.tp, 1), "context": (p.cp, p.tp), "experts": (p.ep, p.tp)}
        return sum(
            (self.exchange_ms if each.over == "experts" else self.ring_ms)(each.bytes, *groups[each.over], each.steps)
            for each in collectives
            if over in (None, each.over)
        )

    def replicas_ms(self, weight_bytes: int, weights: float, expert_weights: float) -> float:
        """Time of a reduce-scatter or an all-gather of so many bytes a weight over data-parallel ranks.

        On a ring each of n ranks sends (n - 1)/n of all bytes, in n - 1 steps (Patarasuk and Yuan 2009).
        """
        p = self.parallelism
        ranks = p.dp * p.cp
        return sum(
            self.ring_ms(weight_bytes * (n - 1) / n * count, n, p.tp * ranks // n, n - 1)
            for count, n in ((weights, ranks), (expert_weights, ranks // p.ep))
            if weight_bytes * count
        )

    def ring_ms(self, nbytes: float, ranks: int, stride: float, steps: int) -> float:
        """Time of a collective in which each of some ranks sends so many bytes in so many steps, on a ring.

        The ranks are every `stride`-th GPU. A ring leaves a node by one network card, or by all cards if it has all
        GPUs of the node, but no faster than it passes from GPU to GPU within.
        """
        gpu = self.gpu
        link, network = gpu.link_bytes_per_s * gpu.link_fraction, gpu.network_bytes_per_s * gpu.network_fraction
        if ranks * stride <= gpu.gpus_per_node:
            speed = link
        else:
            speed = max(network, min(link, gpu.gpus_per_node * network)) if stride == 1 else network
        return nbytes / speed * MS + steps * gpu.link_us * US if ranks > 1 else 0.0

    def exchange_ms(self, nbytes: float, ranks: int, stride: int, steps: int) -> float:
        """Time of an all-to-all in which each of some ranks sends so many bytes, the same to each other rank.

        What goes to other nodes leaves by the rank's own network card, while the rest takes links.
        """
        gpu = self.gpu
        near = min(ranks, max(1, gpu.gpus_per_node // stride))
        away = nbytes * (ranks - near) / (ranks - 1)
        over_links_s = (nbytes - away) / (gpu.link_bytes_per_s * gpu.link_fraction)
        over_network_s = away / (gpu.network_bytes_per_s * gpu.network_fraction)
        return max(over_links_s, over_network_s) * MS + steps * gpu.link_us * US

    @cached_property
    def host_speed(self) -> float:
        """Bytes per second from or to the host, in one direction.

        GPUs that share a link and run the same stage transfer at the same time. Otherwise neighbours in the pipeline
        share it, and the problem names it.
        """
        sharing = 1 if self.neighbours_share_host_links else self.gpu.gpus_per_host_link
        return self.gpu.host_bytes_per_s * self.gpu.host_fraction / sharing

    @property
    def neighbours_share_host_links(self) -> bool:
        """Whether neighbours in the pipeline share host links."""
        return self.gpu.gpus_per_host_link > 1 and self.parallelism.gpus == self.parallelism.pp
