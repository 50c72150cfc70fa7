"""Ports for servers that must know theirs before they start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
