"""Where a service can listen."""

import pytest

from rag_model.errors import UsageError
from rag_model.serving.http.server import open_listener
from rag_model.serving.run import BindSettings


@pytest.mark.parametrize(("ports", "words"), [((65_536,), "--port is 65536"), ((0, -5), "--health-port is -5")])
def test_what_is_no_port_is_refused(ports: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=f"{words}: give 1 to 65535"):
        BindSettings("127.0.0.1", *ports)


@pytest.mark.parametrize("host", ["nohost.invalid", "192.0.2.1", "a..b"])
def test_an_address_that_is_not_of_this_machine_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=f"cannot listen at '{host}' .*: give another --host"), open_listener(host, 0):
        pass
