"""The tiny checkpoint of random weights that `compare` is tested with."""

from tests.fidelity.conftest import tiny_whole as tiny_whole
