"""A server of snugvl from Python: the four tasks and chat, as `snugvl.load` gives them for a model.

    calls.py ──► what to send, as data ──► clients.py ──► what came back ──► answers.py
                (the openai SDK carries it: connection.py)

`calls` and `answers` do no I/O over the network and are shared by both clients, as errors are.
"""

from snugvl.client.answers import Memory
from snugvl.client.clients import AsyncClient, Client
from snugvl.client.connection import DEFAULT_URL

__all__ = ["DEFAULT_URL", "AsyncClient", "Client", "Memory"]
