"""Names of what stands beside a linear layer: the factors of its adapter, and their dropout."""

ADAPTER_DROPOUT = "lora_dropout"


def is_adapter(parameter: str) -> bool:
    """Whether a parameter's name is that of an adapter's factor."""
    return parameter.rpartition(".")[2] in ("lora_a", "lora_b")
