"""Record: the plain files of a run folder, and what one step leaves behind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from windlass.document import Document

REQUEST_FILE = "request.toml"
PLAN_FILE = "plan.toml"
GRAPH_FILE = "graph.json"
MACHINE_FILE = "machine.toml"
PREDICTION_FILE = "prediction.json"
PROGRAM_FILE = "program.json"
PREDICTED_TIMELINE_FILE = "timeline.predicted.json"
MEASURED_TIMELINE_FILE = "timeline.measured.json"
ENVIRONMENT_FILE = "environment.json"
TOKENIZER_FILE = "tokenizer.json"
REPORT_FILE = "report.html"
JOURNAL_FOLDER = "journal"
CHECKPOINT_FOLDER = "checkpoints"
STATE_FOLDER = "state"
"""Beside the checkpoints: what of a run lives beyond the near tier. Of no use to another run."""
ATTEMPTS_FOLDER = "attempts"
"""The plain files of earlier attempts that had another plan, by the attempt's number."""
MERGED_CHECKPOINT_FOLDER = ".merged"
"""Among the checkpoints: one whose parts were put together to go on from."""
TOKENS_FOLDER = "tokens"
"""The text as tokens, where a run is prepared for hosts that may have neither."""
LAUNCH_FILE = "launch.sh"
"""What starts a prepared run on a cluster."""
LARGEST_MODEL_FILE = "largest_model.json"


class Environment(Document):
    """What a run ran in."""

    windlass: str
    commit: str | None = None
    """Of the code that ran; None outside a git checkout."""
    dirty: bool = False
    """Whether the checkout had uncommitted changes."""
    python: str
    packages: dict[str, str]
    system: str
    host: str
    processor: str
    threads: int
    command: tuple[str, ...]


RunState = Literal["prepared", "running", "finished", "interrupted", "broken", "killed"]
"""`prepared`: for a cluster, and not begun. `killed`: the journal has no end and no process holds
the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer update, measured. Losses are in nats a token, memory in bytes."""

    step: int
    """Counted from 1."""
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    """From the first instruction to the last, without evaluation and saving."""
    memory_bytes: int
    """Peak of the process up to this step; of several devices, of the one that holds most."""
    device_memory_bytes: int | None = None
    """Peak of the device that tells; None where there is only one."""
    read_bytes: int = 0
    """That came from tiers beyond the near one: since the step before, with what settled both. Not
    what an evaluation reads. 0 where nothing moves."""
    written_bytes: int = 0
    """That went to tiers beyond the near one."""
    flush_seconds: float = 0.0
    """After the step: updates that were put off, and done because it evaluates or saves."""
    by_kind: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds by instruction kind."""
    held_out_loss: float | None = None
    """None where this step did not evaluate."""
    held_out_bits_per_byte: float | None = None
    saved: str | None = None
    """Name of the checkpoint begun after this step; None if none was."""
