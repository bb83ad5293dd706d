"""Which tests `make test` takes."""

import collections

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Of a test over several lists of parameters, `make test` has every entry of each list, not every combination."""
    lists = collections.defaultdict(dict)  # (test, which list) -> id of an entry -> its place
    places = {}
    for item in items:
        if item.get_closest_marker("thorough"):
            continue
        ids = item.callspec._idlist if hasattr(item, "callspec") else ()
        entries = [(lists[item.parent, item.originalname, n], id) for n, id in enumerate(ids)]
        places[item] = [(entry.setdefault(id, len(entry)), entry) for entry, id in entries]
    for item, own in places.items():
        longest = max((len(entry) for _, entry in own), default=1)
        if not any(all(i % len(entry) == place for place, entry in own) for i in range(longest)):
            item.add_marker("thorough")
