"""Array types of the cost models."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
FloatOrFloats = float | Floats
"""One number for all elements, or one for each."""
