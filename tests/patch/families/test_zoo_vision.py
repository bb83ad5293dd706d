"""Every vision-language family of the installed transformers, tiny: the patch changes nothing of
what it computes."""

import pytest
import zoo
import zoo_vision
from zoo import IS_CURRENT

# Where the report promises a loss in the head, and there are logits.
ON_LOGITS = {
    "chameleon": "its forward masks the tokens of an image in its logits",
    "git": "its forward cuts the positions of an image from its logits",
}
if not IS_CURRENT:
    ON_LOGITS["inkling2"] = "its logits are cut to unpadded_vocab_size"

pytestmark = pytest.mark.usefixtures("reference_only")


@zoo.each_family(zoo_vision.FAMILIES)
def test_trains_as_before(name):
    assert not zoo_vision.try_family(name).differs


@zoo.each_family(zoo_vision.FAMILIES, ON_LOGITS)
def test_loss_is_where_the_report_says(name):
    trial = zoo_vision.try_family(name)
    assert trial.in_head == trial.promised, trial.fallback


@zoo.each_family(zoo_vision.FAMILIES)
def test_revert_gives_every_class_back(name):
    assert zoo_vision.try_family(name).reverted


@zoo.each_family(zoo_vision.FAMILIES)
def test_the_image_takes_part(name):
    with zoo.unpatched():
        model = zoo_vision.build(name)
        inputs = zoo_vision.batch(model)
        loss, other = (
            zoo.loss_of(model, one) for one in (inputs, zoo_vision.mirror_images(inputs))
        )
    assert abs(other - loss) > 1e-5 * loss


@pytest.mark.parametrize("name", zoo_vision.KNOWN_FAILURES)
def test_fails_without_the_patch(name):
    """That alone is why it is left out."""
    model = zoo_vision.build(name)
    batch = zoo_vision.batch(model)
    with pytest.raises(AttributeError, match=zoo_vision.KNOWN_FAILURES[name]):
        zoo.step(model, batch)


def test_the_tables_name_families():
    table = zoo_vision.ZOO
    left_out = zoo_vision.EXCLUDED
    at_times = set() if IS_CURRENT else {"fuyu"}
    assert list(table) == sorted(table) and {*table} & {*left_out} == at_times
    if IS_CURRENT:
        assert {*table, *left_out} <= set(zoo_vision.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
