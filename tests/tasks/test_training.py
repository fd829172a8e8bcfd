"""What a model never learned: a look at a picture keeps nothing of it, and Python is warned."""

import warnings as warned
from dataclasses import replace

import pytest

import snugvl
from snugvl.core.messages import user
from snugvl.core.training import Training
from snugvl.server.media.pipe import _picture
from snugvl.tasks.training import FEW, PHOTOGRAPH, warnings
from tests.photographs import photograph
from tests.tasks.fake import FakeBackend


def test_pixels_that_are_at_hand_are_not_decoded_once_more() -> None:
    picture = _picture(64, 64, memoryview(bytes(each * 37 % 251 for each in range(64 * 64 * 3))))
    warnings(Training(drawings=True), (user(picture),))
    assert picture.image._im is None, "decoded, it would keep 4 bytes a pixel"


def test_python_is_warned_of_what_the_model_never_learned() -> None:
    backend = FakeBackend()
    model = snugvl.Model(backend)
    with warned.catch_warnings():
        warned.simplefilter("error")
        model.caption(photograph(96, 64))
    backend.described = replace(backend.described, training=Training(drawings=True, min_images=1))
    for call in (
        lambda: model.caption(photograph(96, 64)),
        lambda: model.ask(photograph(96, 64), "What?"),
        lambda: model.detect(photograph(96, 64)),
        lambda: model.chat(snugvl.user(photograph(96, 64), "What?")),
    ):
        with pytest.warns(snugvl.SnugvlWarning) as found:
            call()
        assert [str(each.message) for each in found] == [PHOTOGRAPH]
        assert found[0].filename == __file__, "it points at the caller"
    with pytest.warns(snugvl.SnugvlWarning) as found:
        model.chat("Hello")
    assert [str(each.message) for each in found] == [FEW.format(least=1, count="none")]
    assert FEW.format(least=1, count="none").startswith(
        "The model learned to answer only about pictures. It needs 1 or more of them, and this "
        "conversation has none"
    )
