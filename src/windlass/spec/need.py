"""Need: the smallest machine of a family that a model can be trained on, as it is predicted."""

from windlass.document import Document
from windlass.spec.prediction import Prediction


class Need(Document):
    """What a model needs of a family; every number of it is predicted."""

    model: str
    parameters: int
    family: str
    machine: str | None
    """The smallest on which a plan fits; None: not even the largest."""
    devices: int | None
    """That the fastest plan there takes."""
    cut: str | None
    """`p2 t8 r4`."""
    prediction: Prediction | None
    """Of that plan."""
    tried: tuple[str, ...]
    """The machines that it was planned for, smallest first."""
    refused: str
    """Why nothing fits the last one that was refused; empty if none was."""
