"""Ports that are named before anybody listens at them."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

BELOW_THE_SYSTEMS_OWN = range(20_000, 32_768)
"""From 32,768 (Linux) or 49,152 (macOS) on, any connection of anybody may be given a port meanwhile."""


def free_port() -> int:
    """Drawn, so that tests beside each other hardly meet."""
    while True:
        port = random.SystemRandom().choice(BELOW_THE_SYSTEMS_OWN)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
