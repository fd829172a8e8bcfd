"""Run `snugvl serve` from a program: python examples/start_server.py [--backend NAME] [MODEL]"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import snugvl


@contextmanager
def served(model: str = "pocket", backend: str = "auto") -> Iterator[str]:
    """The address of a server that is ready, and runs until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "snugvl", "serve", model, "--backend", backend]
    server = subprocess.Popen([*command, "--port", str(port), "--quiet"])  # noqa: S603
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["auto", "native", "transformers", "vllm"], default="auto")
    parser.add_argument("model", nargs="?", default="pocket", help="pocket, a folder, or a downloaded Hub id")
    options = parser.parse_args()
    with served(options.model, options.backend) as address, snugvl.Client(address) as client:
        print(f"ready: {address} serves {', '.join(client.models())}")
        held = client.memory()
        for row in held.ledger.rows if held.ledger else ():
            print(f"{row.name}: {row.measured_bytes or 0:,} bytes")
