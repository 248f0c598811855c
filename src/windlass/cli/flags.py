"""Flags that many commands share; importing them imports nothing else of Windlass."""

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A flag that is off unless it is given, without a `--no-` form."""

AsJson = Annotated[Flag, Parameter(name="--json")]
"""The flag `--json`: print values for other programs instead of tables."""
