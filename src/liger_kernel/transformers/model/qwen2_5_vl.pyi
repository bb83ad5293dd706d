# Written by scripts/stubs.py.
from typing import Any

def lce_forward(self: Any, *args: Any, **kwargs: Any) -> Any: ...
