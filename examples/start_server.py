"""Run `snugvl serve` from a program, and wait until it is ready: python examples/start_server.py [MODEL]"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import snugvl


@contextmanager
def served(model: str = "pocket") -> Iterator[str]:
    """The address of a server that runs until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "snugvl.cli", "serve", model, "--port", str(port), "--quiet"]
    server = subprocess.Popen(command)  # noqa: S603
    try:
        with snugvl.Client(f"http://127.0.0.1:{port}", max_retries=0) as client:
            while not ready(client):
                if server.poll() is not None:
                    sys.exit(server.returncode)  # it has said why
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def ready(client: snugvl.Client) -> bool:
    """Whether the server takes requests yet."""
    try:
        return client.health().ready
    except snugvl.EngineUnavailable:  # it doesn't listen yet
        return False


if __name__ == "__main__":
    with served(*sys.argv[1:2]) as address, snugvl.Client(address) as client:
        print(f"ready: {address} serves {', '.join(client.models())}")
        held = client.memory()
        for row in held.ledger.rows if held.ledger else ():
            print(f"{row.name}: {row.measured_bytes or 0:,} bytes")
