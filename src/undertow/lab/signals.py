"""SIGINT and SIGTERM: who hears them while something goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from undertow.errors import Interrupted

BOTH = (signal.SIGINT, signal.SIGTERM)


def stop(number: int, frame: Any) -> None:
    """What a signal does by default here: end what goes on, as Ctrl-C does.

    Raises:
        Interrupted: always.
    """
    raise Interrupted(number)


@contextmanager
def hearing(
    handler: Callable[[int, Any], None], signals: Sequence[signal.Signals] = BOTH
) -> Iterator[None]:
    """Let a handler hear these signals, but for one that the process ignores. In another thread
    than the main one: none."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            each: signal.getsignal(each)
            for each in signals
            if signal.getsignal(each) is not signal.SIG_IGN
        }
    try:
        for each in before:
            signal.signal(each, handler)
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, signal.SIG_DFL if old is None else old)
