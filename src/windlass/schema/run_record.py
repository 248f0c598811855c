"""Run record: the names of a run folder's files, and the measurements of one step."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from windlass.document import Document
from windlass.schema.fact_table import fact_table_html
from windlass.units import format_bytes, format_seconds

REQUEST_FILE = "request.toml"
PLAN_FILE = "plan.toml"
GRAPH_FILE = "graph.json"
MACHINE_FILE = "machine.toml"
PREDICTION_FILE = "prediction.json"
PROGRAM_FILE = "program.json"
PREDICTED_TIMELINE_FILE = "timeline.predicted.json"
MEASURED_TIMELINE_FILE = "timeline.measured.json"
ENVIRONMENT_FILE = "environment.json"
CONFIG_FILE = "config.json"
"""The settings of a run of a loop that is not Windlass's own, or of another tracker."""
TOKENIZER_FILE = "tokenizer.json"
MODEL_CONFIG_FILE = "model_config.json"
"""Copy of the `config.json` of a model of Hugging Face, whose folder may go away."""
GENERATION_CONFIG_FILE = "generation_config.json"
"""Copy of what such a folder says of how its model writes."""
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
EXAMPLES_FILE = "examples.safetensors"
"""The data of a run that was given them as tensors."""
REPORT_FILE = "report.html"
SAMPLE_FILE = "sample.txt"
"""Text that the model wrote at the end of the run, for its page."""
TASKS_FOLDER = "tasks"
"""The tasks that are scored during training."""
EVALUATIONS_FOLDER = "evaluations"
"""Scores of the run's checkpoints on tasks, a file each."""
JOURNAL_FOLDER = "journal"
CHECKPOINT_FOLDER = "checkpoints"
STATE_FOLDER = "state"
"""Folder of a run's offloaded model state; no other run can use it."""
ATTEMPTS_FOLDER = "attempts"
"""Folder with the files of earlier attempts that had another plan, by attempt number."""
MERGED_CHECKPOINT_FOLDER = ".merged"
"""Folder among the checkpoints: a checkpoint whose shards were merged to resume from."""
CONVERTED_CHECKPOINT_FOLDER = ".converted"
"""Folder among the checkpoints: one whose layers were made sparser or dense for the next leg."""
TOKENS_FOLDER = "tokens"
"""Folder with the tokenized text of a run that is prepared for other hosts."""
LAUNCH_FILE = "launch.sh"
"""The script that starts the ranks of one host of a prepared run."""
SLURM_FILE = "slurm.sh"
"""The script for `sbatch`, which starts a prepared run on all hosts."""
JOBSET_FILE = "jobset.yaml"
"""The same for Kubernetes."""
TRAINJOB_FILE = "trainjob.yaml"
"""The same for Kubeflow Trainer."""
RAY_FILE = "ray_train.py"
"""The same for Ray Train."""
LAUNCH_SECRET_FILE = "launch.secret"  # noqa: S105  a file name
"""Prefix of the keys with which the hosts of a cluster meet; only its owner can read it."""
LARGEST_MODEL_FILE = "largest_model.json"


class Environment(Document):
    """The software and host that a run used."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset(
        {"commit", "dirty", "host", "command"}
    )

    windlass: str
    """Version of Windlass."""
    commit: str | None = None
    """Git commit of the code; None outside a git checkout."""
    dirty: bool = False
    """Whether the checkout had uncommitted changes."""
    python: str
    packages: dict[str, str]
    system: str
    host: str
    processor: str
    threads: int
    command: tuple[str, ...]
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables that change what is computed or how fast, by an allow-list."""


ConfigScalar = str | bool | int | float | None
ConfigValue = ConfigScalar | tuple[ConfigScalar, ...]
"""A setting as a program or a tracker gives it; NaN and infinite numbers are kept."""


class RunConfig(Document):
    """The settings of a run of a loop that is not Windlass's own."""

    values: dict[str, ConfigValue]
    """By dotted key, such as `optimizer.lr`."""


RunState = Literal["prepared", "running", "finished", "interrupted", "broken", "killed"]
"""`prepared`: written for a cluster and not started. `killed`: the journal has no end and no
process holds the folder."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Step:
    """One measured training step. Losses are in nats per token, memory in bytes."""

    step: int
    """Counted from 1."""
    loss: float
    gradient_norm: float
    """NaN if the step was skipped because its gradients overflowed float16."""
    learning_rate: float
    tokens: int
    """Tokens of the step; of a model that takes none, images or examples."""
    seconds: float
    """Time from the first instruction to the last, without evaluation and saving."""
    memory_bytes: int
    """Peak memory of the process up to this step; with several devices, of the fullest one."""
    device_memory_bytes: int | None = None
    """Peak memory of the device that writes the record; None with one device."""
    loss_scale: float | None = None
    """Loss scale of the step after this one; None in all precisions but float16."""
    read_bytes: int = 0
    """Bytes read from offload tiers since the step before, with flushes of deferred updates and
    without evaluation; 0 if nothing is offloaded."""
    written_bytes: int = 0
    """Bytes written to offload tiers, counted likewise."""
    contention: float | None = None
    """Share of the step for which threads that could run waited for a core; None if the system does
    not tell, or if this host has fewer cores than the run has ranks."""
    flush_seconds: float = 0.0
    """Time after the step to flush deferred updates, because it evaluates or saves."""
    by_kind: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds by instruction kind."""
    arrivals: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """When the rank came to the instructions that wait for other ranks, by kind: the mean of their
    starts, in seconds after the step's. Empty with one device."""
    cpu_seconds: float | None = None
    """CPU time that all threads of the process took in the step; None if a run of an earlier
    version did not measure it."""
    held_out_loss: float | None = None
    """Loss on held-out text; None if this step did not evaluate."""
    held_out_bits_per_byte: float | None = None
    held_out_loss_ema: float | None = None
    """The same loss with averaged weights (EMA); None if the run keeps none."""
    held_out_accuracy: float | None = None
    """Share of held-out examples, or pairs of sentences, whose class is predicted right; None
    without classes."""
    held_out_sentence_loss: float | None = None
    """Part of the held-out loss that is of pairs of sentences; None without a sentence head."""
    task_scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Metrics of tasks, by `TASK.METRIC`; empty if this step scored none."""
    expert_load: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Tokens of the whole global batch that chose each expert, by the name of its router."""
    dropped_share: float | None = None
    """Share of the choices of experts in the global batch that found no room; None without a
    capacity."""
    saved: str | None = None
    """Name of the checkpoint that was started after this step; None if none was."""

    def __repr__(self) -> str:
        return f"<Step {self.step}: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        return fact_table_html(f"step {self.step}", self._facts())

    def _facts(self) -> dict[str, str]:
        facts = {
            "loss": f"loss {self.loss:.4f}",
            "time": format_seconds(self.seconds),
            "gradient norm": f"gradient norm {self.gradient_norm:.3g}",
            "learning rate": f"learning rate {self.learning_rate:.3g}",
            "memory": f"{format_bytes(self.memory_bytes)} at the peak",
        }
        if self.held_out_loss is not None:
            facts["held out"] = f"held out {self.held_out_loss:.4f}"
        if self.held_out_accuracy is not None:
            facts["accuracy"] = f"{100 * self.held_out_accuracy:.1f} % right"
        if self.saved is not None:
            facts["saved"] = f"saved {self.saved}"
        return facts


CODE_FILE = "code.json"
DATA_FILE = "data.json"
InputName = Literal["request", "plan", "graph", "machine", "environment", "code", "data"]
"""What a run is made from. Each is a file of its folder, and has a fingerprint."""


class UntrackedFile(Document):
    """A text file that no commit holds."""

    name: str
    """Its path in the checkout, or the name of a model's file outside of any."""
    sha256: str
    """SHA-256 of the text, in which what looks like a secret is replaced."""
    text: str


class OmittedFile(Document):
    """A changed or untracked file whose content is not kept."""

    name: str
    reason: str
    """`looks like a secret`, `is no text` or `is too large`."""


class CodeTree(Document):
    """The code in one folder: a commit, and how the files differ from it."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"diff", "omitted"})

    commit: str | None = None
    """Git commit that is checked out; None outside of a checkout, or before its first commit."""
    digest: str | None = None
    """SHA-256 of all code, of an installed package that no checkout tracks."""
    diff: str = ""
    """Changes of tracked files as `git diff` prints them, cut after a mebibyte."""
    diff_sha256: str | None = None
    """SHA-256 of all of the diff; None without changes."""
    untracked: tuple[UntrackedFile, ...] = ()
    omitted: tuple[OmittedFile, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be recorded, and why, a sentence each."""


class CodeSnapshot(Document):
    """The code of a run."""

    windlass: CodeTree
    """The code of Windlass itself."""
    project: CodeTree | None = None
    """The user's: of the checkout with the model's file or the working directory. None if there is
    none, or if it is Windlass's own."""

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits for the fingerprints of both trees."""
        parts = (tree.fingerprint() if tree else "" for tree in (self.windlass, self.project))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


class DataSplit(Document):
    """The data on one side of the split into training and held-out data."""

    tokens: int
    documents: int
    """Documents of a text, or examples."""
    tokens_sha256: str
    """SHA-256 of all token ids, in order."""
    documents_sha256: str | None = None
    """SHA-256 of where each document begins and how it is named; None for examples."""


class DataManifest(Document):
    """The data of a run, by content: the same wherever the same text is prepared the same way."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"sources"})

    kind: Literal["text", "examples"]
    sources: tuple[str, ...] = ()
    """The sources as the request names them."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the tokenizer's file; None for examples."""
    vocabulary: int
    train: DataSplit
    held_out: DataSplit
