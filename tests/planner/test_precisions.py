"""What a device cannot compute is no choice of a plan, whatever drives it."""

import pytest

from windlass import plan
from windlass.errors import InputErrors
from windlass.hardware import load_machine
from windlass.hardware.catalog import device_names

SIZES = ("train.batch=8", "train.sequence=512", "batch.micro=8")
HAVE_NO_BFLOAT16 = {"v100", "gc200", "bow"}
HAVE_FLOAT8 = {"b200", "gb200", "h100", "h100-96gb", "h100-pcie", "h200", "l40s", "mi300x"} | {
    "rtx-4090", "rtx-5090", "b300", "gb300", "mi325x", "mi350x", "mi355x", "tpu7x", "trainium2",
}  # fmt: skip
HAVE_FLOAT4 = {"b200", "gb200", "b300", "gb300"}
HAVE_NO_FLOAT16 = {"tpu-v5p", "tpu-v6e", "tpu7x", "sn10-rdu", "sn30-rdu", "sn40l-rdu"}


def names_without(precision: str) -> set[str]:
    """Devices of the catalogue that do not compute in a precision."""
    return {n for n in device_names() if not load_machine(n).device.computes_in(precision)}


def test_each_device_of_the_catalogue_computes_in_what_it_has_and_in_nothing_else():
    assert names_without("float32") == set()
    assert names_without("bfloat16") == HAVE_NO_BFLOAT16
    assert names_without("float16") == HAVE_NO_FLOAT16
    assert names_without("float8") == set(device_names()) - HAVE_FLOAT8
    assert names_without("float4") == set(device_names()) - HAVE_FLOAT4


@pytest.mark.parametrize("stack", ["windlass", "nemo", "fsdp", "deepspeed-zero3", "megatron-2021"])
def test_float16_takes_the_place_of_bfloat16_on_a_v100(stack: str):
    chosen = plan("gpt2-124m", *SIZES, f"stack={stack}", machine="v100").plan
    assert (chosen.precision, chosen.clip) == ("float16", True)


def test_a_run_in_float16_takes_the_norm_of_its_gradients_where_nothing_is_clipped():
    chosen = plan("gpt2-124m", *SIZES, "train.clip=inf", machine="v100").plan
    assert (chosen.precision, chosen.clip) == ("float16", True)


@pytest.mark.parametrize(
    ("machine", "overrides", "said"),
    [
        ("v100", ["stack=torchtitan"], "`v100` states no rate in bfloat16 or float8"),
        ("v100", ["precision=bfloat16"], "choose float32 or float16"),
        ("v100", ["precision=bfloat16", "stack=nemo"], "choose float16"),
        ("a100-80gb", ["precision=float8", "stack=nemo"], "choose bfloat16 or float16"),
        ("a100-80gb", ["precision=float8"], "`precision` = float8, but `a100-80gb` states no rate"),
        ("tpu-v5p", ["precision=float16"], "choose float32 or bfloat16"),
        ("h100", ["precision=float4", "stack=nemo"], "choose bfloat16 or float16 or float8"),
        ("gc200", ["precision=bfloat16", "stack=popart"], "choose float16|has no computation in"),
    ],
)
def test_a_format_that_a_device_lacks_is_refused_with_those_that_it_has(
    machine: str, overrides: list[str], said: str
):
    with pytest.raises(InputErrors, match=said):
        plan("gpt2-124m", *SIZES, *overrides, machine=machine)
