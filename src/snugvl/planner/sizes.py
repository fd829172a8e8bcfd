"""Sizes in words for people."""

GIB = 1 << 30
MIB = 1 << 20


def gib(count: int) -> str:
    """Bytes for people: 4.88 GiB, 951 MiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.0f} MiB"


def megapixels(pixels: int) -> str:
    """Pixels for people, 10^6 of them: 2.8 megapixels."""
    return f"{pixels / 1e6:.1f} megapixels"
