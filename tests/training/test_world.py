"""Scenes, their holdouts, and whether questions and captions tell the truth."""

import random

import pytest
from training.pocket import geometry, interview, language, lettering, questions, scenes, scoring, tasks, world


def test_same_seed_same_scene(cast, pool):
    one, two = (scenes.draw_scene(random.Random(7), scenes.Recipe(), cast, pool) for _ in range(2))
    assert one == two


def test_held_out_things_never_in_training(drawn):
    for scene in drawn:
        assert not world.unseen_canvas(scene.width, scene.height)
        assert not scoring.unseen_pair(scene)
        for t in scene.shown:
            relative = (questions.area(t) / (scene.width * scene.height)) ** 0.5
            assert not world.UNSEEN_BAND[0] + 1e-6 < relative < world.UNSEEN_BAND[1] - 1e-6


def test_held_out_pairs_are_never_named_in_training(drawn):
    pairs = [f"{c} {s}" for c, s in world.UNSEEN_PAIRS]
    rng = random.Random(3)
    for scene in drawn:
        asker = questions.Asker(scene, rng)
        for e in [tasks.detect_named(asker), *(interview.ask(asker) for _ in range(8))]:
            assert e is None or not any(f"{p} " in f"{e.question} {e.answer} " for p in pairs), e


def test_evaluation_seeks_what_is_held_out(cast, pool):
    rng = random.Random(5)
    found = [scenes.draw_scene(rng, scenes.Recipe(evaluation=True), cast, pool) for _ in range(60)]
    assert all(world.unseen_canvas(s.width, s.height) for s in found)
    assert sum(scoring.unseen_pair(s) for s in found) > 10


def test_fonts_are_split():
    trained, held = set(lettering.font_files(False)), set(lettering.font_files(True))
    if not trained:
        pytest.skip("no Debian fonts here")
    assert not trained & held


def test_things_stay_inside_and_in_order(drawn):
    for scene in drawn:
        assert len(scene.shown) <= 10
        assert len(scene.words) <= 3
        assert list(scene.things) == sorted(scene.things, key=lambda t: t.order)
        for t in scene.things:
            assert t.box[0] >= 0
            assert t.box[1] >= 0
            assert t.box[2] <= scene.width
            assert t.box[3] <= scene.height


def test_answers_agree_with_a_recount(drawn):
    rng = random.Random(11)
    seen = set()
    for scene in drawn:
        asker = questions.Asker(scene, rng)
        for _ in range(12):
            e = interview.ask(asker)
            if e is None:
                continue
            seen.add(e.kind)
            text = e.question.lower().replace("grey", "gray")
            if e.kind == "count":
                hits = [n for n in {t.label for t in scene.shown} if world.plural(n) in text]
                if len(hits) == 1 and f" {world.plural(hits[0])}" in f" {text}" and hits[0].count(" ") == 1:
                    named = [t for t in scene.shown if world.plural(t.label) == world.plural(hits[0])]
                    assert int(e.answer) in (len(named), *_sized(named, text)), (e, named)
            elif e.kind == "background":
                assert scene.background.color in e.answer.lower()
            elif e.kind == "text" and scene.words:
                assert sorted(scoring.words_in(e.answer)) == sorted(t.text for t in scene.words)
    assert {"count", "color", "where", "exists", "beside", "compare", "extreme", "at", "text"} <= seen


def _sized(things, text):
    return [sum(t.size == size for t in things) for size in world.SIZES if size in text]


def test_caption_facts_read_back(drawn):
    for scene in drawn:
        facts = scoring.caption_facts(language.short_caption(scene))
        groups = language.grouped(scene.shown, with_size=True)
        expected = {language.counted(label, len(m)) for label, m in groups.items()}
        if scene.things:
            assert expected <= set(facts)
            assert len(facts) >= 1 + len(expected) + (1 if scene.words else 0)


def test_boxes_are_the_outlines_bounds(drawn):
    for scene in drawn:
        for t in scene.shown:
            if t.kind != "shape":
                continue
            points = geometry.turned(t.name, t.angle, t.half)
            xs, ys = [t.center[0] + p[0] for p in points], [t.center[1] + p[1] for p in points]
            assert (min(xs), min(ys), max(xs), max(ys)) == pytest.approx(t.box, abs=0.02)


@pytest.mark.parametrize(
    "size", [(64, 64), (1024, 64), (64, 1024), (640, 480), (5000, 40), (1, 180), (333, 1000)]
)
def test_any_size_has_a_grid(size):
    rows, columns = geometry.token_grid(*size)
    assert rows >= 1
    assert columns >= 1
    assert rows * columns < 500
