"""Find free ports on loopback, for servers that bind a port some time after it is chosen.

The ports are below those that Linux gives to outgoing connections and for port 0
(`net.ipv4.ip_local_port_range`, from 32768). Otherwise a connection of any program on a busy
machine could take a port before its server binds it, and the server would end.
"""

import random
import socket
from contextlib import ExitStack, suppress

from rag_model.errors import ResourceError

_FIRST_PORT, _LAST_PORT = 15_000, 32_767


def find_free_ports(count: int, preferred: int = 0) -> list[int]:
    """Return different free ports, chosen at random; the first is `wanted` if that one is free.

    Raises:
        ResourceError: fewer than `count` ports are free.
    """
    candidates = [preferred] if preferred else []
    candidates += random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT + 1), _LAST_PORT - _FIRST_PORT + 1)
    ports: list[int] = []
    with ExitStack() as sockets:  # until all are chosen, so that no two are equal
        for port in candidates:
            if len(ports) == count:
                return ports
            probe = sockets.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    raise ResourceError("there are too few free ports on 127.0.0.1: stop other servers")
