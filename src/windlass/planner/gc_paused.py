"""Uncollected: no garbage is collected while plans are sought.

A search makes hundreds of thousands of small objects that live until it ends, and no circles of
them, so that a collector goes through all of them again and again and finds nothing: a tenth of the
time of `windlass plan`.
"""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def gc_paused(work: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """The same work with the collector at rest, if it was not already."""

    @wraps(work)
    def at_rest(*given: _Given.args, **named: _Given.kwargs) -> _Found:
        if not gc.isenabled():
            return work(*given, **named)
        gc.disable()
        try:
            return work(*given, **named)
        finally:
            gc.enable()

    return at_rest
