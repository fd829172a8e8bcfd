"""Rows that are decoded together, each of which joined when its own prompt was computed.

`generate` prepares a prompt (positions, cache, encodings of pictures, whatever a family wants) and is stopped
there: `custom_generate` is called in place of its loop and hands everything to us. The loop itself is ours,
so that rows join and leave between two steps. A prompt is computed alone, without padding; only then its
row is put beside the others, aligned at the right:

    generate ─ prepared ─ forward ──┐                 attention mask      positions
                                    ├─ join ─┐        1 1 1 1 1 1 1       0 1 2 3 4 5 6
    generate ─ prepared ─ forward ──┘        │        0 0 0 1 1 1 1       · · · 0 1 2 3
                                             └─ decode ─ decode ─ pick ─ decode …

That needs a cache whose rows we can move (`cache.py`), positions and an attention mask that the model takes
as arguments, and nothing else that a row would have to bring. Most decoders are like that. Where one isn't
(encoder and decoder, cross attention, states of its own, code from the checkpoint), its rows run one after
the other: `Batch.shared` says so.

Source: `GenerationMixin._sample` of Hugging Face transformers 5.23 (Apache-2.0).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.generation import utils as generation

from snugvl.backends.transformers.cache import cache_bytes, join, joinable, pick, shorten
from snugvl.backends.transformers.row import Row

PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_PIXELS = frozenset(generation.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) | {"mm_encoder_outputs"}


class Batch:
    """Rows with their ids, their cache, and what else the model's `forward` is told."""

    def __init__(
        self, model: Any, ids: torch.Tensor, told: dict[str, Any], rows: list[Row], always: Any = None
    ) -> None:
        """`always`: processors of logits that the checkpoint's generation settings ask for."""
        self.model = model
        self._always = always
        self.rows = rows
        self._ids = ids  # [rows, columns]; the last column is not in the cache yet
        self._told = told

    @property
    def columns(self) -> int:
        """Tokens of the longest row."""
        return int(self._ids.shape[1])

    @property
    def nbytes(self) -> int:
        """Of the cache."""
        return cache_bytes(self._told.get("past_key_values", self._told))

    @property
    def shared(self) -> bool:
        """Whether its rows can be moved: into another batch, or away from their neighbours."""
        rest = {name: value for name, value in self._told.items() if name not in PER_TOKEN}
        return (
            type(self.model).__module__.startswith("transformers.")
            and not self.model.config.is_encoder_decoder
            and joinable(rest.pop("past_key_values", None))
            and all(value is None or isinstance(value, bool | int | float) for value in rest.values())
            and isinstance(self._told.get("position_ids"), torch.Tensor)
            and "attention_mask" in inspect.signature(self.model.forward).parameters
        )

    def decode(self) -> torch.Tensor:
        """Compute the last column. Logits `[rows, vocab]`."""
        length = 1 if self._told.get("use_cache", True) else None
        inputs = self.model.prepare_inputs_for_generation(
            self._ids, next_sequence_length=length, **self._told
        )
        return self._run(inputs)

    def append(self, tokens: list[int]) -> None:
        """Add a column of sampled tokens."""
        column = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, column], dim=1)

    def join(self, other: "Batch") -> None:
        """Put the rows of `other` below these; both are `shared`."""
        columns = max(self.columns, other.columns)
        names = {"attention_mask", *self._per_token(), *other._per_token()}
        mine, theirs = self._columns_of(columns, names), other._columns_of(columns, names)
        self._told |= {
            name: torch.cat([mine[name], theirs[name]], dim=mine[name].dim() - 2) for name in names
        }
        join(self._told["past_key_values"], other._told["past_key_values"], columns - 1)
        self._ids = torch.cat([_left(self._ids, columns), _left(other._ids, columns)])
        self.rows += other.rows

    def keep(self, rows: list[int]) -> None:
        """Keep the rows at these indices, then the columns that one of them uses."""
        if rows == list(range(len(self.rows))):
            return
        self.rows = [self.rows[row] for row in rows]
        self._pick(rows)
        mask = self._told["attention_mask"]
        if mask is None:
            return
        unused = int(mask.any(0).int().argmax())  # the first column that a row uses
        if unused:
            self._told |= {name: value[..., unused:] for name, value in self._per_token().items()}
            shorten(self._told["past_key_values"], unused)
            self._ids = self._ids[:, unused:]
        if bool(self._told["attention_mask"].all()):
            self._told["attention_mask"] = None

    def copied(self, rows: list[Row]) -> None:
        """Make of the one row that is here one for each of `rows`, which have the same prompt."""
        if len(rows) > 1:
            self._pick([0] * len(rows))
        self.rows = rows

    def prefill(self) -> torch.Tensor:
        """Compute all columns of the prompt. Logits `[1, vocab]` of its last token."""
        inputs = self.model.prepare_inputs_for_generation(self._ids, is_first_iteration=True, **self._told)
        logits = self._run(inputs)
        self._told = {name: value for name, value in self._told.items() if name not in _PIXELS}
        return logits

    def _run(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        outputs = self.model(**inputs, return_dict=True)
        self._told = self.model._update_model_kwargs_for_generation(
            outputs, self._told, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        # Copied: a view would keep the logits of the whole prompt where a model computes them all.
        logits: torch.Tensor = outputs.logits[:, -1].clone()
        return self._always(self._ids, logits) if self._always else logits

    def _per_token(self) -> dict[str, torch.Tensor]:
        return {name: self._told[name] for name in PER_TOKEN if self._told.get(name) is not None}

    def _columns_of(self, columns: int, names: set[str]) -> dict[str, torch.Tensor]:
        """What is told for every token, so many columns wide; what isn't told is 1 in a mask, 0 as a kind."""
        told = self._per_token()
        for name in names - told.keys():
            told[name] = torch.full_like(self._ids, int(name == "attention_mask"))
        return {name: _left(value, columns) for name, value in told.items()}

    def _pick(self, rows: list[int]) -> None:
        self._ids = self._ids[rows]
        # Positions may be `[kinds, rows, columns]`, everything else is `[rows, columns]`.
        self._told |= {name: value[..., rows, :] for name, value in self._per_token().items()}
        pick(self._told["past_key_values"], rows)


def prepared(model: Any, inputs: Mapping[str, torch.Tensor], row: Row) -> Batch:
    """A row as `generate` would begin with it. `inputs` are on the model's device already."""
    return model.generate(  # type: ignore[no-any-return]
        **_continued(inputs, row.generated),
        max_new_tokens=1,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        custom_generate=_Take(row),
    )


class _Take:
    """Called by `generate` in place of its loop."""

    def __init__(self, row: Row) -> None:
        self._row = row
        # `generate` looks at the names that its loop takes.
        self.__signature__ = inspect.signature(generation.GenerationMixin._sample)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **told: Any,
    ) -> Batch:
        return Batch(model, input_ids, told, [self._row], logits_processor)


def _continued(inputs: Mapping[str, torch.Tensor], generated: list[int]) -> dict[str, torch.Tensor]:
    """The inputs of a prompt, with the tokens that were generated before its row lost its cache."""
    if not generated:
        return dict(inputs)
    more, result = len(generated), dict(inputs)
    ids = inputs["input_ids"]
    result["input_ids"] = torch.cat([ids, torch.tensor([generated], device=ids.device)], dim=1)
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            result[name] = pad(inputs[name], (0, more), value=int(name == "attention_mask"))
    return result


def _left(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Zeros at the left, `columns` in all."""
    return pad(values, (columns - values.shape[-1], 0))
