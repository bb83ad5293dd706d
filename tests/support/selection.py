"""Choose the tests of `make test`, and those of a machine without a GPU."""

import collections

import pytest
from hardware import DEVICE

MANY_COMBINATIONS = 32  # of a test: without a GPU, a third of those beyond `make test`'s is left
FEW_COMBINATIONS = 3  # of a test of one operator or loss, in `make test`


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Mark the combinations of parameters that `make test` leaves out as thorough.

    Of a test over several lists of parameters, `make test` has every entry of each list, not every
    combination. Of a test of one operator or loss it has only the first `FEW_COMBINATIONS` of
    these; the tests that every operator goes through are a folder above.

    The interpreter takes seconds for what a GPU does in no time. There, of a test with more than
    `MANY_COMBINATIONS`, only a third of the others is left.
    """
    counts = collections.Counter((item.parent, item.originalname) for item in items)
    dropped = set()
    for item, indices in _parameter_indices(items).items():
        longest = max((size for _, size in indices), default=1)
        # the first of the longest lists tells how far along the item is
        position = next((index for index, size in indices if size == longest), 0)
        # as if one went through all lists at once
        on_diagonal = all(position % size == index for index, size in indices)
        if on_diagonal and (position < FEW_COMBINATIONS or not _tests_one_operator(item)):
            continue
        item.add_marker("thorough")
        has_many = counts[item.parent, item.originalname] > MANY_COMBINATIONS
        is_one_of_three = sum(index for index, _ in indices) % 3 == 0
        if DEVICE == "cpu" and has_many and not on_diagonal and not is_one_of_three:
            dropped.add(item)
    if dropped:
        deselected = [item for item in items if item in dropped]
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=deselected)


def _parameter_indices(items):
    """Return for each item a list of (index of its parameter, number of parameters) by list.

    Thorough and other items of a test count as those of two tests.
    """
    lists = collections.defaultdict(dict)  # (test, number of the list, thorough) -> id -> index
    indices = {}
    for item in items:
        ids = item.callspec._idlist if hasattr(item, "callspec") else ()
        thorough = bool(item.get_closest_marker("thorough"))
        indices[item] = []
        for n, id in enumerate(ids):
            indices_by_id = lists[item.parent, item.originalname, n, thorough]
            index = indices_by_id.setdefault(id, len(indices_by_id))
            indices[item].append((index, indices_by_id))
    return {
        item: [(index, len(indices_by_id)) for index, indices_by_id in pairs]
        for item, pairs in indices.items()
    }


def _tests_one_operator(item):
    """Return True if the test is in a folder of ``tests/ops``, or in ``tests/losses``."""
    folders = item.path.parts[len(item.config.rootpath.parts) : -1]
    return folders == ("tests", "losses") or folders[:2] == ("tests", "ops") and len(folders) > 2
