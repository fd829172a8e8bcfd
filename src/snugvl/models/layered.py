"""A network of which one part is in memory at a time, read from its files whenever it is needed.

    files     │ tower │ layer 0 │ layer 1 │ … │ layer n │ norm │ head, a slice of the vocabulary at a time │
    memory    └ part ─┘ part ───┘ part ───┘

So a model runs that fits nowhere, as slowly as its files are read: for many tokens at once, layer by layer.
The parts are those of `models/networks.py`, in whatever format `Storage` says; what is computed with them is
another program's matter. Of the embedding only the rows are read that are asked for.

While a part computes, the next is on its way from the disk into the system's cache (`read_ahead`), which it
gives up whenever the memory is wanted.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby

import torch
from torch import nn

from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.layers.linear import Linear
from snugvl.layers.weights import to_int8
from snugvl.models.loader import GPU_READERS, OpenCheckpoint, targets_of
from snugvl.models.networks import LoadableNetwork, give_memory
from snugvl.models.readers import Readers
from snugvl.models.tensor_files import TensorFiles


class LayeredNetwork:
    """A network whose parts are given memory one at a time. Not thread-safe.

    Attributes:
        model: the network; its parts have no memory but within `part`.
        device: where parts are.
        readers: threads that read a part into its place on a GPU.
    """

    def __init__(
        self, opened: OpenCheckpoint, device: torch.device, told: Callable[[int], None] = lambda _read: None
    ) -> None:
        """`told`: called now and then with the number of bytes of files read since the last call."""
        self.model: LoadableNetwork = opened.model
        self._opened = opened
        self.device, self.readers = device, GPU_READERS
        self._stored = opened.stored
        self._told = told
        names = {id(target.parameter): name for name, target in targets_of(self.model)}
        self._table, self._head = (
            self._stored.entry(names[id(each.weight)])
            for each in (self.model.decoder.embed_tokens, self.head)
        )
        by_name = {entry.name: entry for entry in self._stored.tensors.values()}
        self._files = TensorFiles(by_name, self._stored.blocks, device)

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, and of weights that aren't stored in fewer bits."""
        return self.model.dtype

    @property
    def head(self) -> Linear:
        """The layer that makes logits of hidden states (lm_head)."""
        model = self.model
        return model.decoder.embed_tokens if model.config.tie_word_embeddings else model.lm_head

    @property
    def vocab_size(self) -> int:
        """Logits of a token."""
        return self.model.config.text.vocab_size

    @contextmanager
    def part(self, module: nn.Module) -> Iterator[None]:
        """Within, a part has its memory and its weights.

        Raises:
            CheckpointError: a file has changed meanwhile.
        """
        try:
            give_memory(module, self.device)
            mine = {id(parameter) for parameter in module.parameters()}
            targets = {name: each for name, each in targets_of(self.model) if id(each.parameter) in mine}
            last = 0

            def told(done: int, _total: int) -> None:
                nonlocal last
                self._told(done - last)
                last = done

            with closing(Readers(self._stored, self.device, self.readers)) as reading:
                reading.fill(targets, told)
            yield
        finally:
            module.to("meta")

    def weigh_inputs(self) -> None:
        """Measure the inputs that rounding to few bits goes by; call it before a decoder's first part, as the
        engine does."""
        self._opened.weigh_inputs(self.device, self.readers)

    def read_ahead(self, module: nn.Module) -> None:
        """Ask the system to read what a part needs, without waiting; where it can't be asked, nothing."""
        if not hasattr(os, "posix_fadvise"):
            return
        mine = {id(parameter) for parameter in module.parameters()}
        entries = [
            self._stored.entry(name) for name, each in targets_of(self.model) if id(each.parameter) in mine
        ]
        for path, group in groupby(sorted(entries, key=_place), key=lambda entry: entry.file):
            with path.open("rb") as file:
                for entry in group:
                    os.posix_fadvise(file.fileno(), entry.offset, entry.nbytes, os.POSIX_FADV_WILLNEED)

    def stored_bytes(self, *modules: nn.Module) -> int:
        """Bytes of files that parts are read from; a tied head is the embedding's."""
        mine = {id(parameter) for module in modules for parameter in module.parameters()}
        return sum(
            self._stored.entry(name).nbytes
            for name, each in targets_of(self.model)
            if id(each.parameter) in mine
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of `ids` `[n]` int64 on the host: `[n, hidden]` on the device; few distinct ones."""
        distinct, places = torch.unique(ids, return_inverse=True)
        rows = torch.cat([self._files.rows(self._table, token, token + 1) for token in distinct.tolist()])
        return self._as_stored(self.model.decoder.embed_tokens, rows, self.dtype)[places.to(self.device)]

    def head_rows(self, first: int, last: int) -> torch.Tensor:
        """Rows of the head as they are stored, in float32: `[last - first, hidden]`."""
        rows = self._files.rows(self._head, first, last)
        self._told(rows.nbytes)
        return self._as_stored(self.head, rows, torch.float32)

    def close(self) -> None:
        """Close its files."""
        self._files.close()

    def _as_stored(self, linear: Linear, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of embedding or head, rounded as in memory; they are 16 bits wide or int8."""
        if linear.format == "int8":
            return to_int8(rows, linear.group).wide(dtype)
        return rows.to(self.dtype).to(dtype)


def part_bytes(module: nn.Module) -> int:
    """Bytes of a part in memory."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _place(entry: TensorEntry) -> tuple[str, int]:
    return str(entry.file), entry.offset
