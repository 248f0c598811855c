"""The type of functions that execute instructions."""

from collections.abc import Callable, Mapping

from windlass.program.instruction import Kind

Handler = Callable[[int, int], None]
"""Executes one instruction for (layer, micro-batch); 0 where the instruction names none."""

Handlers = Mapping[Kind, Handler]
"""The handler of each instruction kind."""
