"""A callback that records a training of Hugging Face's `Trainer`.

from windlass.integrations.transformers import WindlassCallback

trainer = Trainer(model, args, callbacks=[WindlassCallback(name="first try")], ...)
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from windlass.integrations.tracked_run import TrackedRun, init

_transformers = import_module("transformers")


class WindlassCallback(_transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Records what the trainer logs, from the process with rank 0.

    The run goes on after the training, because evaluations follow; it ends with the process, or by
    `callback.run.finish()`.

    Args:
        options: arguments of `windlass.init`; `config` is added to that of trainer and model.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  those of another function
        self.run: TrackedRun | None = None
        """The run; None before the training and on other ranks."""
        self._options = options

    def on_train_begin(
        self,
        args: Any,  # noqa: ANN401  of a package without types, here and below
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401, ARG002
        model: Any = None,  # noqa: ANN401
        **_more: object,
    ) -> None:
        """Starts the run with the settings of trainer and model."""
        if self.run is not None or not state.is_world_process_zero:
            return
        config = {
            "model": type(model).__name__,
            "trainer": args.to_dict(),  # which names tokens and does not show them
            "model_config": model.config.to_dict() if hasattr(model, "config") else {},
        }
        options = dict(self._options)
        given = options.pop("config", None) or {}
        self.run = init(config={**config, **given}, rank=0, **options)

    def on_log(
        self,
        args: object,  # noqa: ARG002
        state: Any,  # noqa: ANN401
        control: object,  # noqa: ARG002
        logs: Mapping[str, object] | None = None,
        **_more: object,
    ) -> None:
        """Records the numbers of one log; texts among them are left out."""
        if self.run is not None and logs:
            numbers = {name: value for name, value in logs.items() if not isinstance(value, str)}
            self.run.log(numbers, step=state.global_step)
