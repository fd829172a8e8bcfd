"""A server of a scripted engine in a process of its own, for signals: `python -m … WAIT_S DRAIN_S`.

Prints its port, then every state of the engine. At SIGUSR1 the answers that wait go on, without a wait.
"""

import signal
import sys

from snugvl.core.service import Health
from snugvl.server.connection import address_of, listen
from snugvl.server.run import run
from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService, Script


def tell(health: Health) -> None:
    print(health.state, flush=True)


if __name__ == "__main__":
    service = FakeService(Script(words=["slow"] * 5, wait_s=float(sys.argv[1])))
    signal.signal(signal.SIGUSR1, lambda *_: service.go_on())
    settings = ServerSettings(port=0, drain_s=float(sys.argv[2]))
    with listen(settings) as listener:
        print(address_of(listener)[1], flush=True)
        sys.exit(run(service, settings, listener, tell))
