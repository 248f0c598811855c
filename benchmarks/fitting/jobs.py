"""Which constants are fitted together, their priors, and the rows that they are fitted to."""

from collections.abc import Mapping
from dataclasses import dataclass

from fitting.least_squares import Prior


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Constants that are fitted together, and the rows that they are fitted to."""

    rows: Mapping[str, Mapping[str, int]]
    """Table -> cluster -> rows to select."""
    stacks: Mapping[str, Mapping[str, Prior]]
    """Stack -> constant -> prior."""
    clusters: Mapping[str, Mapping[str, Prior]]
    memory: Mapping[str, Mapping[str, Prior]]
    """Stack -> constant of its memory -> prior."""

    @property
    def priors(self) -> dict[tuple[str, str, str], Prior]:
        """Priors of the constants of step time, by (`stack` or `cluster`, name, constant)."""
        return {
            (sort, name, key): prior
            for sort, owners in (("stack", self.stacks), ("cluster", self.clusters))
            for name, owned in owners.items()
            for key, prior in owned.items()
        }


_MEMORY = {
    "buffer_bytes": Prior(3e9, 0.5), "allocator_share": Prior(0.06, 0.5),
    "activations": Prior(1.0, 0.15),
}  # fmt: skip
_ON_GPUS, _ON_IPUS = 0.58, 0.55
"""Rate of convolutions over that of matrix products: what rows of MXNet on GPUs show, which is the
prior on IPUs, and what rows on IPUs show, which is the prior on GPUs."""
_UNSEEN = 0.9
"""Rate of products over the machine's, of a stack that nobody has seen: the median of those that
rows were fitted to."""
_SINGLE, _MULTI = "vtrain_single_a100.csv", "vtrain_multi_a100.csv"
_BLOOM, _TITAN = "bigscience_bloom_prequel_a100_80gb.csv", "torchtitan.csv"
_MLPERF = "mlperf_bert_resnet_v1.0_v1.1_v2.0.csv"

JOBS = (
    Job(
        rows={_SINGLE: {"vtrain": 100}, _MULTI: {"vtrain": 28}, _BLOOM: {"jean-zay": 18}},
        stacks={
            "megatron-deepspeed": {
                "products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2),
                "launch_seconds": Prior(40e-6, 0.4), "pair_launches": Prior(0.2, 0.5),
                "collective_seconds": Prior(15e-6, 0.5), "message_seconds": Prior(3e-4, 0.7),
                "step_seconds": Prior(1e-3, 0.8),
            }
        },
        clusters={
            "vtrain": {
                "network": Prior(17e9, 0.3), "crowding": Prior(2.0, 1.0),
                "stragglers": Prior(0.015, 0.5),
            },
            "jean-zay": {
                "inner": Prior(150e9, 0.5), "network": Prior(5e9, 0.6),
                "crowding": Prior(1.0, 1.0), "stragglers": Prior(0.01, 0.5),
                "old_software_share": Prior(0.05, 0.5),
            },
        },
        memory={"megatron-deepspeed": _MEMORY},
    ),
    Job(
        rows={
            "korthikanti_2022.csv": {"selene-2022": 4}, "megatron_sc21.csv": {"selene-2021": 6},
        },
        stacks={
            "megatron-core": {
                "products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2),
                "launch_seconds": Prior(30e-6, 0.4), "message_seconds": Prior(2e-4, 0.7),
                "collective_seconds": Prior(15e-6, 0.5), "attention_rate": Prior(1.0, 0.2),
            },
            "megatron-2021": {"products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2)},
        },
        clusters={"selene-2022": {}, "selene-2021": {"network": Prior(15e9, 0.2)}},
        memory={},
    ),
    Job(
        rows={"megatron_sc21.csv": {"selene-zero3": 3}},
        stacks={"deepspeed-zero3": {"gather_exposed": Prior(0.3, 0.5)}},
        clusters={"selene-zero3": {"network": Prior(4e9, 0.5)}},
        memory={},
    ),
    Job(
        rows={"llm_foundry_mpt.csv": {"mosaic-h100": 20, "mosaic-a100": 30}},
        stacks={
            "fsdp": {
                "products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2),
                "attention_rate": Prior(1.0, 0.2), "launch_seconds": Prior(12e-6, 0.4),
                "gather_exposed": Prior(0.1, 0.8), "step_seconds": Prior(2e-2, 0.8),
            }
        },
        clusters={
            "mosaic-h100": {"network": Prior(40e9, 0.2)},
            "mosaic-a100": {"network": Prior(18e9, 0.2)},
        },
        memory={},
    ),
    Job(
        rows={_TITAN: {"torchtitan": 8, "torchtitan-rowwise": 1}},
        stacks={
            "torchtitan": {
                "products": Prior(0.95, 0.1), "traffic": Prior(1.0, 0.2),
                "attention_rate": Prior(1.0, 0.1), "cast_bytes": Prior(6.0, 0.3),
                "tensor_overlap": Prior(0.6, 0.2), "context_attention": Prior(0.5, 0.5),
                "gather_exposed": Prior(0.05, 0.8),
            },
            "torchtitan-rowwise": {"cast_bytes": Prior(18.0, 0.3)},
        },
        clusters={"torchtitan": {}, "torchtitan-rowwise": {}},
        memory={"torchtitan": _MEMORY},
    ),
    Job(
        rows={"recent_h100_gb200.csv": {"nemo": 6}},
        stacks={
            "nemo": {
                "products": Prior(0.92, 0.07), "attention_rate": Prior(1.0, 0.1),
                "traffic": Prior(1.0, 0.2), "cast_bytes": Prior(6.0, 0.3),
            }
        },
        clusters={"nemo": {}},
        memory={},
    ),
    Job(
        rows={_MLPERF: {"mlperf": 18}},
        stacks={
            "mlperf-bert": {
                "products": Prior(0.9, 0.1), "traffic": Prior(1.0, 0.2),
                "attention_rate": Prior(0.8, 0.3), "step_seconds": Prior(2e-3, 0.8),
            }
        },
        clusters={"mlperf": {}},
        memory={},
    ),
    Job(  # with what an op costs on IPUs and the curve of their products, in their device files
        rows={_MLPERF: {"mlperf-ipu": 4}},
        stacks={"popart": {"step_seconds": Prior(0.2, 0.7)}},
        clusters={"mlperf-ipu": {}},
        memory={},
    ),
    Job(
        rows={"graphcore_performance.csv": {"ipu": 16}},
        stacks={
            "poptorch": {
                "products": Prior(1.0, 0.3), "launch_seconds": Prior(4.9e-6, 0.5),
                "step_seconds": Prior(0.15, 0.7),
            }
        },
        clusters={"ipu": {}},
        memory={},
    ),
    Job(
        rows={_MLPERF: {"resnet-ipu": 4}},
        stacks={
            "tensorflow-ipu": {
                "products": Prior(_ON_GPUS, 0.3), "step_seconds": Prior(2e-3, 0.8),
            }
        },
        clusters={"resnet-ipu": {}},
        memory={},
    ),
    Job(
        rows={_MLPERF: {"resnet": 18}},
        stacks={"mxnet": {"products": Prior(_ON_IPUS, 0.3), "step_seconds": Prior(1e-3, 0.8)}},
        clusters={"resnet": {}},
        memory={},
    ),
    Job(
        rows={"cerebras.csv": {"cerebras": 2}},
        stacks={"modelzoo": {"products": Prior(_UNSEEN, 0.5), "step_seconds": Prior(2e-2, 0.8)}},
        clusters={"cerebras": {}},
        memory={},
    ),
)  # fmt: skip
