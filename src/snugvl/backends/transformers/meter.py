"""The ledger of a process that runs transformers."""

from collections.abc import Mapping
from dataclasses import replace

from snugvl.backends.measure import Meter
from snugvl.backends.service import Load
from snugvl.ledger import Ledger, LedgerRow

HOST_WEIGHTS = "weights in main memory"


class TransformersMeter:
    """Measures one model of transformers in this process.

    What differs from our engine: the cache is as large as what is in it, and weights may wait in main memory
    beside a GPU, where they are no part of its sum.
    """

    def __init__(self, meter: Meter, host_weights: int, planned: Mapping[str, int]) -> None:
        self._meter = meter
        self._host_weights = host_weights
        self._planned = planned

    def read(self, memory: Mapping[str, int], load: Load) -> Ledger:
        """The ledger now."""
        ledger = self._meter.read(memory, load)
        rows = [
            replace(row, used_bytes=row.measured_bytes) if row.name == "KV cache" else row
            for row in ledger.rows
            if row.name != "encoder outputs"  # they live inside a forward: workspace
        ]
        if self._host_weights:
            rows.append(LedgerRow(HOST_WEIGHTS, self._planned.get(HOST_WEIGHTS), self._host_weights))
        return replace(ledger, rows=tuple(rows))
