"""Around: what may stand around the handlers of a run, to look at it or to spoil it on purpose."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from windlass.program.instruction import InstructionKind
from windlass.runtime.compute import ComputeHandlers
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.handler import Handler
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


class HookContext(NamedTuple):
    """What the handlers of one device work with."""

    plan: Plan
    graph: Graph | None
    """None of one device alone, as its pod."""
    compute: ComputeHandlers
    pod: ProcessGroups | None


Handlers = Mapping[InstructionKind, Handler]
HandlerWrapper = Callable[[Handlers, HookContext], Handlers]
"""Gives the handlers that are to run in place of others, which it may call."""
