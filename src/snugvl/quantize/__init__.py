"""Checkpoints of fewer bits, made from others: `snugvl quantize`."""
