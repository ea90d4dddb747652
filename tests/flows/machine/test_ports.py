"""Free ports: different, free, and out of the way of outgoing connections."""

import socket
from pathlib import Path

from flows.machine.local import find_free_ports


def test_ports_differ_and_no_outgoing_connection_gets_them() -> None:
    ports = find_free_ports(200)
    assert len(set(ports)) == 200
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < least


def test_a_wanted_port_is_taken_only_if_it_is_free() -> None:
    (wanted,) = find_free_ports(1)
    assert find_free_ports(2, wanted)[0] == wanted
    with socket.create_server(("127.0.0.1", wanted)):
        assert wanted not in find_free_ports(2, wanted)
