"""Free ports are different, free, and outside of the range of outgoing connections."""

import socket
from pathlib import Path

from flows.machine.local import find_free_ports


def test_ports_are_different_and_below_those_of_outgoing_connections() -> None:
    ports = find_free_ports(200)
    assert len(set(ports)) == 200
    first_outgoing_port = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first_outgoing_port


def test_the_preferred_port_is_used_only_if_it_is_free() -> None:
    (preferred,) = find_free_ports(1)
    assert find_free_ports(2, preferred)[0] == preferred
    with socket.create_server(("127.0.0.1", preferred)):
        assert preferred not in find_free_ports(2, preferred)
