"""Results of a comparison, as records and as figures of a variant.

The reference's own greedy answer is found by checking drafts of it, each pass with one reading of its files.

A reference that is read layer by layer from the disk would need a reading for every token. But a variant's
answer is nearly its answer: given all of a draft at once, the reference says after each token which one it
would have taken, and every token up to the first difference is its own, and the one there is known:

    draft        A  dog  on  a    lawn .  ⏹
    reference    A  dog  on  the                    accepted: A dog on the
    next draft   A  dog  on  the  grass .  ⏹        the variant goes on behind what is accepted

So each pass brings an answer at least one token further, and mostly to its end. What is accepted is exactly
what greedy decoding would give (with the same arithmetic), whatever the draft. Answers with a grammar are
checked under the same grammar.

Source: speculative decoding with greedy verification, Leviathan et al. 2023
(https://arxiv.org/abs/2211.17192).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snugvl.errors import OutputError
from snugvl.fidelity.participant import Participant
from snugvl.fidelity.variants import Question
from snugvl.tasks import detect
from snugvl.tasks.results import Box, Detections, Reply


@dataclass(frozen=True, slots=True)
class Verified:
    """The known beginning of the reference's answer; `done`: whether that is all of it."""

    tokens: tuple[int, ...] = ()
    done: bool = False


def verified(
    accepted: tuple[int, ...], draft: Sequence[int], best: Sequence[int], ends: frozenset[int], limit: int
) -> Verified:
    """The reference's answer as far as a draft behind `accepted` verifies it.

    Args:
        best: for each token of the draft, the reference's likeliest token there.
        ends: tokens that end an answer.
        limit: tokens of an answer, at most.
    """
    tokens = list(accepted)
    for offered, taken in zip(draft, best, strict=True):
        tokens.append(taken)
        if taken in ends or taken != offered:
            break
    tokens = tokens[:limit]
    return Verified(tuple(tokens), bool(tokens) and (tokens[-1] in ends or len(tokens) >= limit))


def furthest(found: Sequence[Verified]) -> Verified:
    """Longest of several beginnings of one answer."""
    return max(found, key=lambda each: (len(each.tokens), each.done), default=Verified())


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """Score of one answer: per token its KL in nats, and whether the likeliest token is the reference's."""

    kl: tuple[float, ...]
    same: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """The agreement of two answers' boxes.

    Attributes:
        iou: mean intersection over union of all boxes, 0 for those without a partner; None without boxes.
        matched: pairs of boxes with the same label that overlap.
        missed: boxes of the reference without a partner; `added`: the variant's.
    """

    iou: float | None
    matched: int
    missed: int
    added: int


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """One question to one variant: a score with both answers, or an error.

    Attributes:
        complete: whether the reference's answer is known to its end.
        same: whether both answers are the same, token by token.
        boxes: where the answers are boxes and the reference's is complete.
    """

    picture: str
    question: Question
    variant: str
    error: Exception | None = None
    score: AnswerScore | None = None
    answer: str = ""
    reference: str = ""
    complete: bool = False
    same: bool = False
    boxes: Boxes | None = None

    def record(self, model: str) -> dict[str, Any]:
        """The outcome as a record of JSON Lines. `model`: the reference."""
        head: dict[str, Any] = {"image": self.picture, "task": self.question.task, "model": model}
        head |= {"params": self.question.params, "variant": self.variant}
        if self.score is None:
            return head | {"error": {"type": type(self.error).__name__, "message": str(self.error)}}
        tokens = len(self.score.kl)
        result: dict[str, Any] = {
            "tokens": tokens,
            "kl": sum(self.score.kl) / tokens,
            "kl_most": max(self.score.kl),
            "likeliest": sum(self.score.same) / tokens,
            "answer": self.answer,
            "reference": self.reference,
            "complete": self.complete,
            "same": self.same,
        }
        if self.boxes is not None:
            result["boxes"] = {name: getattr(self.boxes, name) for name in Boxes.__slots__}
        return head | {"result": result}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a variant over all of its answers.

    Attributes:
        kl: nats a token; `kl_error`: its standard error over answers; None for fewer than two.
        likeliest: share of tokens whose likeliest one is the reference's.
        same: number of answers equal to the reference's; `incomplete`: of those whose reference's isn't known
            to its end.
        iou: mean over the pictures that have boxes.
    """

    variant: str
    answers: int
    failed: int
    tokens: int
    kl: float
    kl_error: float | None
    likeliest: float
    same: int
    incomplete: int
    iou: float | None

    def record(self, model: str) -> dict[str, Any]:
        """The figures as a record of JSON Lines."""
        values = {name: getattr(self, name) for name in Figures.__slots__ if name != "variant"}
        return {"model": model, "variant": self.variant, "summary": values}


def figures(variant: str, outcomes: Sequence[QuestionOutcome]) -> Figures:
    """The figures of a variant from all of its outcomes."""
    scored = [each for each in outcomes if each.score is not None]
    scores = [each.score for each in scored if each.score is not None]
    sums = [(sum(score.kl), len(score.kl)) for score in scores]
    tokens = sum(count for _, count in sums)
    kl = sum(total for total, _ in sums) / tokens if tokens else math.nan
    ious = [each.boxes.iou for each in scored if each.boxes is not None and each.boxes.iou is not None]
    return Figures(
        variant,
        answers=len(scored),
        failed=len(outcomes) - len(scored),
        tokens=tokens,
        kl=kl,
        kl_error=_error(sums, kl),
        likeliest=sum(sum(score.same) for score in scores) / tokens if tokens else math.nan,
        same=sum(each.same for each in scored),
        incomplete=sum(not each.complete for each in scored),
        iou=sum(ious) / len(ious) if ious else None,
    )


def _error(sums: Sequence[tuple[float, int]], mean: float) -> float | None:
    """Standard error of a mean over tokens that come in answers: those of one answer aren't independent."""
    count, tokens = len(sums), sum(each for _, each in sums)
    if count < 2:
        return None
    spread = sum((total - mean * each) ** 2 for total, each in sums)
    return math.sqrt(spread * count / (count - 1)) / tokens


def outcome(
    picture: str,
    size: tuple[int, int],
    question: Question,
    name: str,
    sides: tuple[Participant, Participant],
    answer: tuple[int, ...],
    truth: Verified,
    score: AnswerScore,
) -> QuestionOutcome:
    """The outcome of a question from both answers. `sides`: the reference and the variant."""
    reference, variant = sides
    boxes = None
    if question.task == "detect" and truth.done:
        found = _detections(variant, answer, size, question)
        boxes = compared(_detections(reference, truth.tokens, size, question), found)
    return QuestionOutcome(
        picture,
        question,
        name,
        score=score,
        answer=variant.text(answer),
        reference=reference.text(truth.tokens),
        complete=truth.done,
        same=truth.done and truth.tokens == answer,
        boxes=boxes,
    )


def _detections(
    side: Participant, tokens: tuple[int, ...], size: tuple[int, int], question: Question
) -> Detections:
    """The boxes of an answer; none where it has no usual form."""
    finish = "stop" if tokens and tokens[-1] in side.ends else "length"
    reply = Reply(text=side.text(tokens), finish_reason=finish)
    try:
        return detect.result(reply, size, question.objects, side.capabilities, max_pixels=side.max_pixels)
    except OutputError:
        return Detections(width=size[0], height=size[1])


def compared(right: Detections, ours: Detections) -> Boxes:
    """The agreement of boxes: those of the same label are paired, the largest overlap first."""
    pairs = sorted(
        (
            (overlap(a.box, b.box), i, j)
            for i, a in enumerate(right.objects)
            for j, b in enumerate(ours.objects)
            if a.label.casefold() == b.label.casefold()
        ),
        key=lambda pair: (-pair[0], pair[1], pair[2]),
    )
    taken: set[int] = set()
    given: set[int] = set()
    total = 0.0
    for value, i, j in pairs:
        if value > 0 and i not in taken and j not in given:
            taken.add(i)
            given.add(j)
            total += value
    matched = len(taken)
    missed, added = len(right.objects) - matched, len(ours.objects) - matched
    count = matched + missed + added
    return Boxes(total / count if count else None, matched, missed, added)


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, 0 to 1."""
    width = min(a.x2, b.x2) - max(a.x1, b.x1)
    height = min(a.y2, b.y2) - max(a.y1, b.y1)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (a.area + b.area - shared)
