"""The devices that these tests run on: a GPU with `pytest -m gpu`, else the CPU."""

from collections.abc import Iterator

import pytest
import torch

from windlass.torch_ext import Device, device_for


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The CPU, whose runs show that a test's own code is right, or the first GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU of NVIDIA or AMD on this machine")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield device_for(f"{request.param}:0" if request.param == "cuda" else "cpu")
    torch.set_num_threads(threads)
