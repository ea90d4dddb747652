"""A real S3 server, SeaweedFS, on loopback for tests and benchmarks."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.machine.local import find_free_ports

KEY, SECRET = "bookwheel", "bookwheel-secret"


def environment_of(endpoint: str) -> dict[str, str]:
    """Return the environment variables with which the AWS libraries reach the server, and no other service."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def run_seaweed(folder: Path) -> Iterator[str]:
    """Run the server with its data in `folder`, which is removed afterwards; yield its URL."""
    keys = [{"accessKey": KEY, "secretKey": SECRET}]
    identity = {
        "name": "tests",
        "credentials": keys,
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    services = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = dict(zip([f"{name}{kind}" for name in services for kind in ("", ".grpc")], find_free_ports(8), strict=True))
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": folder,
        "master.telemetry": "false",
        "master.electionTimeout": "1s",
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **ports,
    }
    command = [
        str(Path(sys.executable).with_name("weed")),
        "server",
        *(f"-{k}={v}" for k, v in options.items()),
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        wait_until_up(f"{endpoint}/healthz", server, folder / "log")
        yield endpoint
    finally:
        server.kill()  # a graceful stop takes 15 seconds, and the data are temporary
        server.wait()
        for name in ports.values():
            for path in Path("/tmp").glob(f"seaweedfs-*-{name}.sock"):
                path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a started server answers, with an error or not; `log` is the file of its output."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError as error_reply:
            error_reply.close()
            return
        except OSError:
            time.sleep(0.05)  # between two attempts; no test waits a fixed time
        else:
            return
    raise RuntimeError(f"the server of {url} did not start: {log.read_text()[-2000:]}")
