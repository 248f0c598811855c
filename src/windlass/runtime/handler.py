"""The type of functions that execute instructions."""

from collections.abc import Callable, Mapping

from windlass.program.instruction import InstructionKind

Handler = Callable[[int, int], None]
"""Executes one instruction for (layer, micro-batch); 0 where the instruction names none."""

Handlers = Mapping[InstructionKind, Handler]
"""The handler of each instruction kind."""
