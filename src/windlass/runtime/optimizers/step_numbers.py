"""StepNumbers: what an update takes from the host: its learning rates, and the clip divisor."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from windlass.runtime.optimizers.learning_rate import learning_rate, rate_and_decay
from windlass.schema import TrainSettings
from windlass.torch_ext import Device


class StepNumbers:
    """The learning rate of each weight in a step, and what its gradients are divided by.

    On an accelerator a rate is rounded to float32, because fused kernels read it so from the
    device's memory: an update that was recorded then equals one that was not.
    """

    def __init__(self, settings: TrainSettings, device: Device) -> None:
        self._settings, self._device = settings, device
        self._rates: dict[float, Tensor] | None = None
        """Learning rates on the device, by their share of the step's; None if the host has them."""
        self._divisor: Tensor | None = None

    def fix_addresses(self, names: Iterable[str]) -> None:
        """From now on the device finds the numbers of all steps in the same memory.

        `begin_step` and `clip_divisor` fill them, so that recorded work can be replayed.
        """
        device = self._device.torch_device
        shares = {rate_and_decay(name, 1.0, self._settings, decays=True)[0] for name in names}
        self._rates = {share: torch.zeros((), device=device) for share in shares}
        self._divisor = torch.ones((), device=self._device.torch_device)

    def begin_step(self, step: int) -> None:
        """Fills the learning rates of a step, counted from 1, if their addresses are fixed."""
        for share, tensor in (self._rates or {}).items():
            tensor.fill_(self._rounded(learning_rate(self._settings, step) * share))

    def rate_and_decay(self, name: str, step: int, *, decays: bool) -> tuple[float | Tensor, float]:
        """Learning rate and weight decay of a weight in a step.

        Args:
            decays: whether weights of its dimensions decay where no group says otherwise.

        Returns:
            The rate as `Float[]` on the device if addresses are fixed.
        """
        share, decay = rate_and_decay(name, 1.0, self._settings, decays=decays)
        if self._rates is not None:
            return self._rates[share], decay
        return self._rounded(learning_rate(self._settings, step) * share), decay

    def _rounded(self, rate: float) -> float:
        return float(np.float32(rate)) if self._device.is_asynchronous else rate

    def clip_divisor(self, norm: float, *, scale: float = 1.0) -> Tensor | None:
        """`Float[]`: divisor that undoes the loss scale and limits the gradient norm to the clip.

        Without a scale it is the reciprocal of the coefficient of `torch.nn.utils.clip_grad_norm_`;
        None for 1, unless addresses are fixed.
        """
        clip, divisor = self._settings.clip, scale
        if clip is not None and norm + 1e-6 > clip:
            divisor *= (norm + 1e-6) / clip
        # Filled on the device: copying a number to it would make the host wait.
        if self._divisor is not None:
            return self._divisor.fill_(divisor)
        if divisor == 1:
            return None
        return torch.full((), divisor, device=self._device.torch_device)
