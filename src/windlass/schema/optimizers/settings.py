"""The settings that optimizers share: each one's defaults, and what is wrong with those given."""

from collections.abc import Iterator, Mapping

from windlass.schema.optimizers.law import OptimizerName, optimizer_law

_UNREAD: dict[str, object] = {
    "betas": (0.9, 0.95), "momentum": 0.9, "nesterov": False, "epsilon": 1e-8,
    "relative_step": False,
}  # fmt: skip
"""Values of the settings that an optimizer does not read."""


def optimizer_settings(name: OptimizerName) -> dict[str, object]:
    """Default of each setting that the optimizers share, by key of `train`."""
    law = optimizer_law(name)
    read = {key: getattr(law, key) for key in _UNREAD}
    chosen = {key: _UNREAD[key] if value is None else value for key, value in read.items()}
    return {**chosen, "weight_decay": law.weight_decay, "schedule": law.schedule}


def unread_settings(name: OptimizerName, given: Mapping[str, object]) -> Iterator[str]:
    """Settings that an optimizer does not read, a sentence each.

    Args:
        given: values by key of `train`; None where nothing is given.
    """
    law = optimizer_law(name)
    for key, unread in _UNREAD.items():
        value = given[key]
        if getattr(law, key) is None and value not in (None, unread):
            yield (
                f"`{key}` = {str(value).lower()} with `optimizer` = {name}, which has none; leave "
                "it out"
            )


def averaging_faults(
    name: OptimizerName, betas: tuple[float, float] | None, ema: float | None
) -> Iterator[str]:
    """Why weights cannot be averaged as asked, a sentence each.

    Args:
        betas: its betas; None if none are given.
        ema: share of an average of the weights that remains after each step; None for no average.
    """
    if not optimizer_law(name).averages:
        return
    if ema is not None:
        yield (
            f"`ema` = {ema:g} with `optimizer` = {name}, which averages its weights by itself; "
            "leave it out"
        )
    if betas is not None and betas[0] == 0:
        yield (
            f"`betas` = {list(betas)} with `optimizer` = {name}: its gradients are taken at a "
            "point between two sequences of weights, of which 0 would lose one; set the first to "
            "more than 0, such as 0.9"
        )
