"""How fast main memory reaches a GPU: PCI Express, by generation and lanes."""

from typing import Final

# Bytes per second and lane, one way, after line coding (PCI-SIG): 8b/10b to generation 2, 128b/130b to 5.
LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def pcie_bandwidth(generation: int | None, lanes: int | None) -> float | None:
    """Bytes per second of a link, or None where either is unknown."""
    if not generation or not lanes:
        return None
    return LANE_BYTES_PER_S[min(max(generation, 1), max(LANE_BYTES_PER_S))] * lanes
