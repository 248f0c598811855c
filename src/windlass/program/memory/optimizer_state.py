"""Which state of an optimizer a plan can keep, and where: what it cannot, a sentence each."""

from collections.abc import Iterator

from windlass.schema import DEVICE_TIER, MomentFormat, OptimizerName, Precision, optimizer_law


def master_weight_errors(optimizer: OptimizerName, precision: Precision | None) -> Iterator[str]:
    """Why an optimizer cannot update weights without float32 masters.

    Args:
        precision: precision that layers compute in; None if it is open.
    """
    if precision != "bfloat16":
        asked = "left open" if precision is None else f"= {precision}"
        yield (
            f"`master_weights` = false with `precision` {asked}: weights are rounded "
            "stochastically to bfloat16 only; set `precision` = bfloat16, or leave "
            "`master_weights` out"
        )
    law = optimizer_law(optimizer)
    if law.scope != "element" or law.averages:
        yield (
            f"`master_weights` = false with `train.optimizer` = {optimizer}: only updates that "
            "read one element of one weight are rounded; leave `master_weights` out, or set "
            "`train.optimizer` = adamw, lion or sgd"
        )


def moment_errors(optimizer: OptimizerName, moments: MomentFormat) -> Iterator[str]:
    """Why an optimizer's moments cannot be stored in a format."""
    if moments != "float32" and not optimizer_law(optimizer).quantizes_moments:
        yield (
            f"`moments` = {moments} with `train.optimizer` = {optimizer}: only AdamW's two moments "
            "are stored in fewer bits; set `moments` = float32, or `train.optimizer` = adamw"
        )


def sparse_state_errors(optimizer: OptimizerName, *, sparse: bool) -> Iterator[str]:
    """Why an optimizer cannot update weights that are stored in kept blocks."""
    if sparse and optimizer_law(optimizer).factored:
        yield (
            f"`train.optimizer` = {optimizer} with `sparsity`: its second moment is that of whole "
            "rows and columns, and kept blocks lie apart; set `train.optimizer` = adamw, or leave "
            "`sparsity` out"
        )


def offloaded_optimizer_errors(optimizer: OptimizerName, parts: int) -> Iterator[str]:
    """Why an optimizer's state cannot be offloaded where so many ranks hold parts of weights."""
    scope = optimizer_law(optimizer).scope
    if scope == "matrix":
        yield (
            f"`train.optimizer` = {optimizer} with offloaded state, which is updated part by part: "
            f"it updates whole matrices; set `offload.optimizer` = {DEVICE_TIER}, or "
            "`train.optimizer` = adamw, lion or sgd"
        )
    elif scope == "tensor" and parts > 1:
        yield (
            f"`train.optimizer` = {optimizer} with offloaded state of which ranks hold parts: its "
            "norms of whole weights are summed in device memory only; set `offload.optimizer` = "
            f"{DEVICE_TIER}, or train on one device"
        )
