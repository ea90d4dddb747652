"""Free ports on loopback, for servers that bind a port some time after it is chosen.

They lie below the ports that Linux gives to outgoing connections (`net.ipv4.ip_local_port_range`, from 32768) and for
port 0. Otherwise, on a busy machine, a connection of any program can take a port before its server binds it, and the
server ends.
"""

import random
import socket
from contextlib import ExitStack, suppress

from rag_model.errors import ResourceError

_LEAST, _MOST = 15_000, 32_767


def free_ports(count: int, wanted: int = 0) -> list[int]:
    """Return different free ports, chosen at random; the first is `wanted` if that one is free.

    Raises:
        ResourceError: there are not so many.
    """
    tried = [wanted] if wanted else []
    tried += random.SystemRandom().sample(range(_LEAST, _MOST + 1), _MOST - _LEAST + 1)
    ports: list[int] = []
    with ExitStack() as held:  # until all are chosen, so that no two are equal
        for port in tried:
            if len(ports) == count:
                return ports
            one = held.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
    raise ResourceError("there are too few free ports on 127.0.0.1: stop other servers")
