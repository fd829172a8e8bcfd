"""The whole comparison: variants answer, the reference checks, and what differs is measured.

    for each variant     its engine answers every question greedily                      (its own plan)
                         a pass over its network: last hidden states at its answers      layer by layer
    the reference        a pass for all answers of all variants together                 layer by layer
    for each variant     both heads, a slice of the vocabulary at a time: KL, likeliest tokens
    as often as wished   one variant drafts how the reference goes on, a pass checks it (`results.py`)

So the reference's files are read once for all figures, and once more for each round of drafts. Whatever ends
the work, the next run goes on where it was (`work.py`).
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from snugvl.backends.place import TargetDevice, device_of, place_on
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.checkpoint.safetensors import weight_files
from snugvl.core.options import LoadOptions
from snugvl.errors import InputError, OutOfMemory, RequestError
from snugvl.fidelity.memory import PassPlan
from snugvl.fidelity.participant import Participant, check_tokens, published
from snugvl.fidelity.results import AnswerScore, QuestionOutcome, Verified, furthest, outcome, verified
from snugvl.fidelity.stages import Answered, Item, MemoryRow, Rival, Stages, Tokens, stored_bytes
from snugvl.fidelity.variants import Variant, allocation_of, name_of
from snugvl.fidelity.work import Clock, Tell, Work, folder_of
from snugvl.layers.device import out_of_memory
from snugvl.planner.plan import Allocation

Given = dict[int, Answered]
"""A variant's answers, by question."""

Scores = dict[int, tuple[AnswerScore, Tokens]]
"""Of each, its score, and which tokens the reference takes where it stands."""


class Comparison:
    """A comparison of variants with a reference, on some pictures. Not thread-safe."""

    def __init__(
        self,
        reference: Participant,
        rivals: Sequence[Rival],
        items: Sequence[Item],
        options: LoadOptions,
        *,
        passes: int,
        work: Work,
        tell: Tell = lambda _stage, _detail, _done, _left: None,
    ) -> None:
        """
        Args:
            options: device and memory, for all of them.
            passes: times that the reference is read, at most: the first finds the figures, the others more of
                its own answers.
        """
        self.reference, self.rivals, self.items = reference, rivals, items
        self._passes = passes
        self._clock = Clock(self._readings(), tell)
        self._stages = Stages(items, options, work, self._clock)

    @property
    def rows(self) -> list[MemoryRow]:
        """Planned and measured memory of the stages that ran."""
        return self._stages.rows

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return self._clock.seconds

    @property
    def reading_bytes(self) -> int:
        """Bytes of files that are read at most, all readings together."""
        return sum(self._readings().values())

    def plans(self) -> dict[str, PassPlan]:
        """Memory plans of the passes over the reference and over each variant, by name.

        Raises:
            DoesNotFit: one of them has no room.
        """
        place = self._stages.place()
        found = {"reference": self._stages.plan(self.reference, len(self.rivals), place)}
        return found | {rival.name: self._stages.plan(rival.side, 1, place) for rival in self.rivals}

    def estimate(self) -> float:
        """Seconds that the reading takes at most, estimated by one layer's way from disk to device."""
        with self._stages.network(self.reference) as network:
            layer = network.model.decoder.layers[0]
            began = time.monotonic()
            with network.part(layer):
                if network.device.type == "cuda":
                    torch.cuda.synchronize(network.device)
            self._clock.measured(network.stored_bytes(layer), time.monotonic() - began)
        return self._clock.left_s or 0.0

    def close(self) -> None:
        """End the processes that were started. Safe to call twice."""
        for side in (self.reference, *(rival.side for rival in self.rivals)):
            side.close()

    def run(self) -> list[QuestionOutcome]:
        """All outcomes, variant by variant in the order of the questions.

        Raises:
            SnugvlError: a variant can't be loaded, or none of its questions can be answered.
            OutOfMemory: another program has taken the planned memory; results so far are kept.
        """
        try:
            return self._run()
        except Exception as error:
            if not out_of_memory(error):
                raise
            said = str(error).splitlines()[0][:120]
        raise OutOfMemory(
            f"{said}; other programs may have taken what was planned: when they have given it back, "
            "--resume goes on with an --output file"
        )

    def _run(self) -> list[QuestionOutcome]:
        given = [self._answers(number) for number in range(len(self.rivals))]
        for number, rival in enumerate(self.rivals):
            mine = {n: (each.tokens,) for n, each in given[number].items() if each.error is None}
            self._stages.sweep(f"variant-{number}", f"{rival.name}: distributions", rival.side, mine)
        tried: dict[int, tuple[Tokens, ...]] = {}  # different answers to one question, in order
        for n in range(len(self.items)):
            if answers := [each[n].tokens for each in given if each[n].error is None]:
                tried[n] = tuple(dict.fromkeys(answers))
        self._stages.sweep("reference", "the reference: distributions", self.reference, tried)
        scores = [self._scores(number, each) for number, each in enumerate(given)]
        truth = self._truth(given, scores)
        return [
            self._outcome(number, n, given[number], scores[number], truth)
            for number in range(len(self.rivals))
            for n in range(len(self.items))
        ]

    def _readings(self) -> dict[str, int]:
        """Bytes that each stage reads, if its questions are all done together."""
        found: dict[str, int] = {}
        for number, rival in enumerate(self.rivals):
            found |= dict.fromkeys((f"answers-{number}", f"variant-{number}"), stored_bytes(rival.side))
        found["reference"] = stored_bytes(self.reference)
        for number in range(2, self._passes + 1):
            drafter = max(stored_bytes(rival.side) for rival in self.rivals)
            found |= {f"drafts-{number}": drafter, f"check-{number}": found["reference"]}
        return found

    def _answers(self, number: int) -> Given:
        rival = self.rivals[number]
        prefixes: dict[int, Tokens] = dict.fromkeys(range(len(self.items)), ())
        found = self._stages.answer(f"answers-{number}", f"{rival.name}: answers", rival, prefixes)
        errors = [each.error for each in found.values() if each.error is not None]
        if len(errors) == len(found):
            raise errors[0]
        return found

    def _scores(self, number: int, given: Given) -> Scores:
        stage, stages = f"scores-{number}", self._stages
        found = {each["number"]: each for each in stages.work.records(stage)}
        missing = {n: each.tokens for n, each in given.items() if each.error is None and n not in found}
        right = {n: partial(stages.states, "reference", n, each) for n, each in missing.items()}
        ours = {n: partial(stages.states, f"variant-{number}", n, each) for n, each in missing.items()}
        if missing:
            self._clock.begin(stage, f"{self.rivals[number].name}: comparing distributions")
        for n, record in stages.judge(self.reference, right, self.rivals[number].side, ours, missing):
            stages.work.add(stage, record)
            found[n] = record
        return {
            n: (AnswerScore(tuple(each["kl"]), tuple(each["same"])), tuple(each["best"]))
            for n, each in found.items()
        }

    def _truth(self, given: Sequence[Given], scores: Sequence[Scores]) -> dict[int, Verified]:
        """The reference's own answers by question, as far as its passes go."""
        ends = self.reference.ends
        truth = {
            n: furthest(
                [
                    verified((), each[n].tokens, found[n][1], ends, item.question.limit)
                    for each, found in zip(given, scores, strict=True)
                    if n in found
                ]
            )
            for n, item in enumerate(self.items)
        }
        drafter = max(zip(self.rivals, scores, strict=True), key=lambda pair: _likeliest(pair[1]))[0]
        for number in range(2, self._passes + 1):
            known = {n: each.tokens for n, each in truth.items() if each.tokens and not each.done}
            truth |= self._further(number, drafter, known)
            for stage in (f"drafts-{number}", f"check-{number}"):
                self._clock.end(stage)
        return truth

    def _further(self, number: int, drafter: Rival, known: dict[int, Tokens]) -> dict[int, Verified]:
        """The answers after one more pass, from the beginnings in `known`."""
        stage, stages, ends = f"pass-{number}", self._stages, self.reference.ends
        found: dict[int, Verified] = {}
        for each in stages.work.records(stage):
            found[each["number"]] = Verified(tuple(each["tokens"]), each["done"])
        missing = {n: tokens for n, tokens in known.items() if n not in found}
        text = f"the reference's answers, pass {number} of {self._passes}"
        given = stages.answer(f"drafts-{number}", f"{text}: drafts", drafter, missing)
        drafts = {n: each.tokens for n, each in given.items() if each.error is None}
        whole = {n: (*missing[n], *draft) for n, draft in drafts.items()}
        stages.sweep(f"check-{number}", text, self.reference, {n: (tokens,) for n, tokens in whole.items()})
        right = {n: partial(self._last, f"check-{number}", n, whole[n], len(drafts[n])) for n in drafts}
        for n, record in stages.judge(self.reference, right, None, {}, whole):
            limit = self.items[n].question.limit
            found[n] = verified(missing[n], drafts[n], record["best"], ends, limit)
            stages.work.add(stage, {"number": n, "tokens": list(found[n].tokens), "done": found[n].done})
        return found

    def _last(self, stage: str, n: int, answer: Tokens, count: int) -> torch.Tensor:
        return self._stages.states(stage, n, answer)[-count:]

    def _outcome(
        self, number: int, n: int, given: Given, scores: Scores, truth: dict[int, Verified]
    ) -> QuestionOutcome:
        rival, item = self.rivals[number], self.items[n]
        if given[n].error is not None:
            return QuestionOutcome(item.name, item.question, rival.name, error=given[n].error)
        sides = self.reference, rival.side
        answers = given[n].tokens, truth[n], scores[n][0]
        return outcome(item.name, item.size, item.question, rival.name, sides, *answers)


def _likeliest(scores: Scores) -> float:
    """Share of tokens, 0 to 1, whose likeliest one is the reference's."""
    same = [value for score, _ in scores.values() for value in score.same]
    return sum(same) / max(len(same), 1)


def comparison_of(
    base: LoadOptions,
    variants: Sequence[Variant],
    items: Sequence[Item],
    *,
    passes: int,
    tell: Tell,
    pictures: Mapping[str, Any],
    reference_pixels: int | None = None,
    output: Path | None = None,
    resume: bool = False,
) -> tuple[Comparison, Work]:
    """Plan a comparison. Without a wish all pictures have the size of the smallest plan.

    Args:
        base: options with the reference's model, the device and the memory.
        passes: times that the reference is read, at most.
        pictures: by name, the mark by which a changed file of the same name is recognised.
        reference_pixels: pixels that the reference's pictures are scaled down to; None: the largest
            variant's.
        output: file beside which the work is kept; None: the work stays in memory.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about a checkpoint.
        DoesNotFit: a variant has no room, with the numbers.
        RequestError: a wish that can't be met.
        InputError: there is an unfinished comparison already, or another one.
    """
    _refuse_gguf(base.model, *(variant.load.model for variant in variants))
    device = device_of(base.device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # makes the context, so that all plans are of what is left beside it
    place = place_on(device, base.memory_bytes)
    what = {
        "model": base.model,
        "files": [[path.name, path.stat().st_size] for path in weight_files(locate(base.model))],
        "variants": [
            variant.load.said() | {"model": variant.load.model, "tower": variant.tower_weights}
            for variant in variants
        ],
        "pictures": dict(pictures),
        "questions": [
            [item.name, item.question.task, item.question.params, item.question.limit] for item in items
        ],
        "reference_pixels": reference_pixels,
    }
    settings = published(base, facts_of(str(locate(base.model)), offline=True), place)
    work = Work(None if output is None else folder_of(output), what, resume=resume)
    plans = [allocation_of(variant, place) for variant in variants]
    formats = [plan.settings.weights_name for plan in plans]
    limits = _limits(work, variants, plans, formats)
    largest = None if None in limits else max(limit for limit in limits if limit is not None)
    reference = Participant(base, settings, place, reference_pixels or largest)
    rivals = _rivals(reference, variants, plans, limits, place)
    made = Comparison(reference, rivals, items, base, passes=passes, work=work, tell=tell)
    return made, work


def _refuse_gguf(*models: str) -> None:
    """Layer by layer only safetensors files are read (`models/layered.py`)."""
    for model in models:
        if gguf_files(model) is not None:
            raise RequestError(
                f"{model} is a GGUF; compare reads safetensors alone, such as those it was made of",
                field="model",
            )


def _limits(
    work: Work, variants: Sequence[Variant], plans: Sequence[Allocation], formats: list[str]
) -> list[int | None]:
    """Pixels of each variant's pictures: the wished ones, else the fewest that any plan has."""
    before = work.records("limits")
    if before:
        if before[0]["formats"] != formats:
            raise InputError(
                f"the comparison began with {'; '.join(before[0]['formats'])}, and memory is for "
                f"{'; '.join(formats)} now; name the formats, or free memory"
            )
        kept: list[int | None] = before[0]["pixels"]
        return kept
    planned = [plan.settings.max_pixels for plan in plans]
    known = [pixels for pixels in planned if pixels is not None]
    common = min(known) if known else None
    limits = [variant.load.max_pixels or common for variant in variants]
    work.add("limits", {"pixels": limits, "formats": formats})
    return limits


def _rivals(
    reference: Participant,
    variants: Sequence[Variant],
    plans: Sequence[Allocation],
    limits: Sequence[int | None],
    place: TargetDevice,
) -> list[Rival]:
    """The variants with their names, each different.

    Raises:
        RequestError: two of them are the same, or one has other tokens than the reference.
    """
    sized = len(set(limits)) > 1
    found: dict[str, Rival] = {}
    for variant, plan, limit in zip(variants, plans, limits, strict=True):
        name = name_of(variant, plan.settings, reference.capabilities.model, sized=sized)
        if name in found:
            raise RequestError(f"two of the variants are the same here: {name}; leave one out")
        side = Participant(variant.load, plan.settings, place, limit)
        check_tokens(reference, side)
        found[name] = Rival(variant, side, name, plan.footprint.total_bytes)
    return list(found.values())
