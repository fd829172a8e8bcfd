"""A look at a picture for what a model never learned keeps nothing of it."""

from snugvl.core.messages import user
from snugvl.core.training import Training
from snugvl.server.intake.pipe import _picture
from snugvl.tasks.training import warnings


def test_pixels_that_are_at_hand_are_not_decoded_once_more() -> None:
    picture = _picture(64, 64, memoryview(bytes(each * 37 % 251 for each in range(64 * 64 * 3))))
    warnings(Training(drawings=True), (user(picture),))
    assert picture.image._im is None, "decoded, it would keep 4 bytes a pixel"
