"""Which tests `make test` takes, and which ones a machine without a GPU."""

import collections

import pytest
from hardware import DEVICE

MANY = 32  # combinations of a test
FEW = 3  # combinations of a test of one operator or loss


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Of a test over several lists of parameters, `make test` has every entry of each list, not
    every combination.

    Of a test of one operator or loss alone it has only the first `FEW` of these; the tests that
    every operator goes through are a folder above. The interpreter takes seconds for what a GPU
    does in no time. There, of a test with `MANY` combinations, only a third of the others is left.
    """
    lists = collections.defaultdict(dict)  # (test, which list) -> id of an entry -> its place
    counts = collections.Counter((item.parent, item.originalname) for item in items)
    places, dropped = {}, []
    for item in items:
        ids = item.callspec._idlist if hasattr(item, "callspec") else ()
        whole = bool(item.get_closest_marker("thorough"))
        entries = [
            (lists[item.parent, item.originalname, n, whole], id) for n, id in enumerate(ids)
        ]
        places[item] = [(entry.setdefault(id, len(entry)), entry) for entry, id in entries]
    for item, own in places.items():
        place, longest = max(
            ((place, len(entry)) for place, entry in own), key=lambda one: one[1], default=(0, 1)
        )
        of_each = all(
            place % len(entry) == its for its, entry in own
        )  # as if one went through all lists at once
        if of_each and (place < FEW or not _is_of_one(item)):
            continue
        item.add_marker("thorough")
        many = not of_each and counts[item.parent, item.originalname] > MANY
        if many and DEVICE == "cpu" and sum(place for place, _ in own) % 3:
            dropped.append(item)
    if dropped:
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=dropped)


def _is_of_one(item):
    """Whether it stands in a folder of ``tests/ops``, or in ``tests/losses``."""
    folders = item.path.parts[len(item.config.rootpath.parts) : -1]
    return folders == ("tests", "losses") or folders[:2] == ("tests", "ops") and len(folders) > 2
