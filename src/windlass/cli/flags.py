"""Flags that many commands share; importing them imports nothing else of Windlass."""

from typing import Annotated

from cyclopts import Parameter

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
"""The flag `--json`: print values for other programs instead of tables."""

Flag = Annotated[bool, Parameter(negative="")]
"""A flag without a `--no-` form."""
