"""Every vision-language family of the installed transformers, tiny: the patch changes nothing of what it computes."""

import pytest
import zoo
import zoo_vision
from zoo import NEW

# Where the report promises a loss in the head, and there are logits.
ON_LOGITS = {
    "chameleon": "its forward masks the tokens of an image in its logits",
    "git": "its forward cuts the positions of an image from its logits",
}
if not zoo.NEWEST:
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
    model = zoo_vision.build(name)
    given = zoo_vision.batch(model)
    loss, other = (zoo.loss_of(model, one) for one in (given, zoo_vision.other_image(given)))
    assert abs(other - loss) > 1e-5 * loss


def test_the_tables_name_families():
    table, left_out = zoo_vision.ZOO, zoo_vision.NOT
    at_times = {"llama4"} if zoo.NEWEST else set() if NEW else {"fuyu"}
    assert list(table) == sorted(table) and {*table} & {*left_out} == at_times
    if NEW:
        newest = set() if zoo.NEWEST else {"apertus1p5", "hy_v4_vl", "inkling2_loop"}
        assert {*table, *left_out} - newest <= set(zoo_vision.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
