"""The device seam: what a CPU answers, and that nothing in the library asks around it."""

import re
from pathlib import Path

import torch

import windlass
from windlass.torch_ext import CpuDevice, CudaDevice, accelerator_device, device_for

SOURCES = Path(windlass.__file__).parent

ASKS_FOR_CUDA = re.compile(r"torch\.cuda|[\"']cuda[\"']|\.is_cuda\b|torch\.(xpu|hpu|mps)\b")

ALLOWED = {
    "torch_ext/device.py": "the backends of torch.distributed",
    "torch_ext/device_kinds.py": "the seam itself",
    "models/float8/linears.py": "which CUDA devices multiply 8-bit factors",
    "sparsity/block_linear_ops.py": "registers kernels for a dispatch key",
    "distributed/launch_script.py": "a word of the catalog and of Slurm",
    "distributed/kubernetes_jobset.py": "a word of the catalog and of Kubernetes",
    "training/new_run.py": "a word of the catalog: which ranks PyTorch's own parts serve",
    "training/inputs/job.py": "a word of the catalog: what counts as GPU-hours",
    "training/preconditions.py": "a word of the catalog: kinds with kernels for kept blocks",
    "cli/plan_summary.py": "a word of the catalog: what a device is called",
    "hardware/probe/host_devices.py": "links of GPUs, which the driver of NVIDIA tells",
    "runtime/distributed/rank_placement.py": "folders of GPU drivers, by the kind of device",
    "program/layer_mode_errors.py": "a word of the catalog",
    "report/terminal/machine_tables.py": "a word of the catalog",
    "schema/machine/machine.py": "a word of the catalog",
    "schema/machine/device.py": "a word of the catalog",
    "validation/predict_run.py": "a word of the catalog",
}
"""Files that may name CUDA, and why."""


def test_no_other_file_asks_whether_cuda_computes():
    found = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if ASKS_FOR_CUDA.search(file.read_text())
    }
    assert found == set(ALLOWED)


def test_devices_of_one_name_are_equal():
    assert device_for("cpu") == device_for(torch.device("cpu")) == device_for("cpu:3")
    assert device_for("cuda:1") == device_for(torch.device("cuda", 1))
    assert len({device_for("cpu"), device_for("cuda:0"), device_for("cuda:1")}) == 3


def test_each_kind_says_which_backend_carries_its_tensors():
    kinds = ("cpu", "cuda:0", "xpu:0", "hpu:0", "mps:0")
    backends = [device_for(kind).communication_backend for kind in kinds]
    assert backends == ["gloo", "nccl", "xccl", "hccl", "gloo"]


def test_only_an_apple_gpu_lacks_float64():
    kinds = ("cpu", "cuda:0", "xpu:0", "hpu:0", "mps:0")
    assert [kind for kind in kinds if not device_for(kind).has_float64] == ["mps:0"]


def test_a_device_without_an_index_is_the_first_where_there_is_none():
    if torch.accelerator.is_available():
        return
    assert device_for("cuda").torch_device == torch.device("cuda", 0)
    assert isinstance(device_for("cuda"), CudaDevice)
    assert isinstance(accelerator_device(), CpuDevice)


def test_a_cpu_has_done_its_work_when_a_call_returns():
    cpu = device_for("cpu")
    tensor, event = torch.ones(3), cpu.new_event(timing=True)
    assert not cpu.is_asynchronous
    assert cpu.to_device(tensor) is tensor
    with cpu.use_stream(cpu.new_stream()):
        event.record(cpu.current_stream())
    event.wait(cpu.current_stream())
    assert event.query()
    later = cpu.new_event(timing=True)
    later.record(None)
    assert event.elapsed_time(later) > 0


def test_a_cpu_counts_the_memory_of_the_process_and_of_the_host():
    cpu = device_for("cpu")
    assert 2**20 < cpu.memory_allocated() <= cpu.peak_memory() < cpu.total_memory()
    assert 0 < cpu.free_memory() < cpu.total_memory()
