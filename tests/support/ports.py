"""Ports for servers of tests."""

import socket
from random import SystemRandom

PORTS = range(10_000, 32_000)  # below those that systems give to connections, which would take it before a server does


def free_port() -> int:
    """A port that was free a moment ago, and that no connection will be given.

    Another test may draw it, too, with a chance of one in thousands.
    """
    while True:
        port = SystemRandom().choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
