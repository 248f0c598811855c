"""Around: what may stand around the handlers of a run, to look at it or to spoil it on purpose."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from windlass.program.instruction import Kind
from windlass.runtime.compute import Compute
from windlass.runtime.distributed.process_groups import Pod
from windlass.runtime.interpreter import Handler
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


class Inside(NamedTuple):
    """What the handlers of one device work with."""

    plan: Plan
    graph: Graph | None
    """None of one device alone, as its pod."""
    compute: Compute
    pod: Pod | None


Handlers = Mapping[Kind, Handler]
Around = Callable[[Handlers, Inside], Handlers]
"""Gives the handlers that are to run in place of others, which it may call."""
