"""Hooks that wrap a run's instruction handlers, to observe them or to inject faults."""

from collections.abc import Callable
from typing import NamedTuple

from windlass.runtime.compute import ComputeHandlers
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.interpreter import Handlers
from windlass.schema import Graph, Plan


class HookContext(NamedTuple):
    """What the handlers of one rank work with."""

    plan: Plan
    graph: Graph | None
    """The graph that the plan divides; None on a single device."""
    compute: ComputeHandlers
    groups: ProcessGroups | None
    """The rank's process groups; None on a single device."""


HandlerWrapper = Callable[[Handlers, HookContext], Handlers]
"""Returns handlers to run in place of the given ones, which they may call."""
