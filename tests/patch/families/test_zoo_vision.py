"""Every vision-language family of the installed transformers, tiny: the patch changes nothing of
what it computes."""

import pytest
import zoo
import zoo_vision
from zoo import NEW

# Where the report promises a loss in the head, and there are logits.
ON_LOGITS = {
    "chameleon": "its forward masks the tokens of an image in its logits",
    "git": "its forward cuts the positions of an image from its logits",
}
if not NEW:
    ON_LOGITS["inkling2"] = "its logits are cut to unpadded_vocab_size"

pytestmark = pytest.mark.usefixtures("reference_only")


@zoo.each(zoo_vision.FAMILIES)
def test_trains_as_before(name):
    assert not zoo_vision.trial(name).differs


@zoo.each(zoo_vision.FAMILIES, ON_LOGITS)
def test_loss_is_where_the_report_says(name):
    tried = zoo_vision.trial(name)
    assert tried.in_head == tried.promised, tried.fallback


@zoo.each(zoo_vision.FAMILIES)
def test_revert_gives_every_class_back(name):
    assert zoo_vision.trial(name).reverted


@zoo.each(zoo_vision.FAMILIES)
def test_the_image_takes_part(name):
    with zoo.without_the_patch():
        model = zoo_vision.build(name)
        given = zoo_vision.batch(model)
        loss, other = (zoo.loss_of(model, one) for one in (given, zoo_vision.other_image(given)))
    assert abs(other - loss) > 1e-5 * loss


@pytest.mark.parametrize("name", zoo_vision.FAILS)
def test_fails_without_the_patch(name):
    """That alone is why it is left out."""
    model = zoo_vision.build(name)
    batch = zoo_vision.batch(model)
    with pytest.raises(AttributeError, match=zoo_vision.FAILS[name]):
        zoo.step(model, batch)


def test_the_tables_name_families():
    table, left_out = zoo_vision.ZOO, zoo_vision.NOT
    at_times = set() if NEW else {"fuyu"}
    assert list(table) == sorted(table) and {*table} & {*left_out} == at_times
    if NEW:
        assert {*table, *left_out} <= set(zoo_vision.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
