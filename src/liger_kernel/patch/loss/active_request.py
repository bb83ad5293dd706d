"""The active request of each thread, by which a head knows that a patched model is calling it.

`loss_in_head` makes a `Request` active while a family's forward runs. A head's forward (`head`) and
the model's ``loss_function`` (`rewrites`) look here for it."""

from __future__ import annotations

import threading


class _ThreadState(threading.local):
    """Holds the request of each thread.

    The attribute is there from the beginning: torch.compile guards on who has which.
    """

    def __init__(self):
        self.request = None


_thread = _ThreadState()


def current_request():
    """Return this thread's request: that of the innermost call of a patched model, or None."""
    return _thread.request


def activate(request):
    """Make a request this thread's. Returns the one before it, which is to be put back."""
    before = current_request()
    _thread.request = request
    return before


class LogitsNeeded(BaseException):
    """Real logits are needed in a place where they come too late: the call has to start again.

    No ``except Exception`` of a forward's catches it.
    """
