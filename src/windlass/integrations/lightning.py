"""A logger that records a training of Lightning's `Trainer`.

from windlass.integrations.lightning import WindlassLogger

trainer = Trainer(logger=WindlassLogger(name="first try"), ...)
"""

from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windlass.integrations.portable_run import flat_config
from windlass.integrations.tracked_run import TrackedRun, init

_package = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
_logger = import_module(f"{_package}.loggers.logger")
_rank_zero_only = import_module(f"{_package}.utilities.rank_zero").rank_zero_only


class WindlassLogger(_logger.Logger):  # type: ignore[misc,name-defined]
    """Records what a Lightning module logs, from the process with rank 0.

    The run starts with the first metric, and goes on after `fit`, because tests follow; it ends
    with the process, or by `logger.experiment.finish()`.

    Args:
        options: arguments of `windlass.init`; hyperparameters of the module are added to `config`.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  those of another function
        super().__init__()
        self._options = options
        self._config = flat_config(options.pop("config", None) or {})
        self._run: TrackedRun | None = None

    @property
    @_logger.rank_zero_experiment  # type: ignore[untyped-decorator]
    def experiment(self) -> TrackedRun:
        """The run, which is started by the first use."""
        if self._run is None:
            self._run = init(config=self._config, rank=0, **self._options)
        return self._run

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self._options.get("name") or "windlass")

    @property
    def version(self) -> str | None:
        """The name of the run's folder; None before it has started."""
        return self._run.folder.name if self._run else None

    @property
    def save_dir(self) -> str:
        """The folder that holds the run folders."""
        return str(Path(self._options.get("root", "runs")))

    @_rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(
        self,
        params: Mapping[str, object] | Namespace,
        *_args: object,
        **_more: object,
    ) -> None:
        """Adds settings to the config of the run."""
        self._config |= flat_config(params)
        if self._run is not None:
            self._run.update_config(params)

    @_rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Records the numbers of one step."""
        self.experiment.log(metrics, step)

    @_rank_zero_only  # type: ignore[untyped-decorator]
    def finalize(self, status: str) -> None:
        """Ends a run whose training failed."""
        if status == "failed" and self._run is not None:
            self._run.finish("broken")
