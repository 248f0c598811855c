"""How a schedule-free optimizer weights the steps that it averages."""

from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.schema import TrainSettings


class NewestShares:
    """The share of each step's weights in the average over the steps so far.

    A step counts by the square of the largest learning rate up to it, so that those of the warm-up
    count little. Source: Defazio et al. 2024, arXiv:2405.15682, section 4.3.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        self._largest, self._sum = 0.0, 0.0
        self._shares: list[float] = []

    def of_step(self, step: int) -> float:
        """The share of a step, counted from 1; 1 in the first."""
        for next_step in range(len(self._shares) + 1, step + 1):
            self._largest = max(self._largest, learning_rate(self._settings, next_step))
            weight = self._largest**2
            self._sum += weight
            self._shares.append(weight / self._sum if self._sum else 1.0)
        return self._shares[step - 1]
