"""One run in the catalogue: its row, the columns of the table of runs, and a question to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from windlass.tracking import SHORT_ID_DIGITS

Setting = str | int | float | bool
"""One value of a request, a plan or a config."""
Unit = Literal["text", "count", "number", "seconds", "bytes", "time", "flag", "json"]
"""What the values of a column are; a `time` is in seconds since 1970."""


class Column(NamedTuple):
    """A column of the table of runs."""

    name: str
    """A field of `RunRow`."""
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunRow:
    """One run of the catalogue. None stands for what the run does not have or did not record.

    Losses are in nats a token.
    """

    id: str
    folder: Path
    name: str
    """The name that the run was given; otherwise the name of its folder."""
    state: str
    """A `RunState`."""
    started: float | None
    """Seconds since 1970."""
    ended: float | None
    """When the last record was written, in seconds since 1970."""
    model: str
    machine: str
    host: str | None
    site: str | None
    """The site that recorded the run, where it was told."""
    group: str | None
    """The sweep, or another name that several runs share."""
    parent: str | None
    """The run that this one started from, `<end of id>@<step>`."""
    attempts: int
    ranks: int
    step: int
    """The last step in the journal; 0 before the first."""
    steps: int | None
    """Requested number of steps."""
    loss: float | None
    """Training loss of the last step."""
    held_out_loss: float | None
    """The last one."""
    metric: str | None
    """`loss`, or the first series of a run that logs none."""
    metric_value: float | None
    """Its last value."""
    seconds: float | None
    """Median step time under the current plan."""
    predicted_seconds: float | None
    low_seconds: float | None
    """Lower end of the 80 % interval of the predicted step time."""
    high_seconds: float | None
    """Upper end of it."""
    memory_bytes: int | None
    """Peak memory of the fullest device."""
    tokens_per_second: float | None
    journal_bytes: int
    """Bytes of the journals of rank 0."""
    changes: int
    """Number of annotations, each a file."""
    verdict: str | None
    """The level of the last verdict."""
    archived: bool
    broken: bool
    """Whether somebody marked the run as no example for others."""
    tags: tuple[str, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    """One sentence for each file that is damaged or changed, and for steps that are lost."""
    kinds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Median seconds of a step by kind of instruction."""
    inputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Fingerprints of the seven inputs by their names; one that the run did not keep is missing."""
    settings: Mapping[str, Setting] = field(default_factory=lambda: MappingProxyType({}))
    """What was asked for and planned, by dotted key."""

    def __repr__(self) -> str:
        steps = f" of {self.steps}" if self.steps else ""
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        return f"<Run {self.short_id} of {self.model}: {self.state}, step {self.step}{steps}{loss}>"

    @property
    def short_id(self) -> str:
        """The last digits of the id, as in the folder's name."""
        return self.id[-SHORT_ID_DIGITS:]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted step time."""
        if self.seconds is None or not self.predicted_seconds:
            return None
        return self.seconds / self.predicted_seconds

    @property
    def outside_interval(self) -> bool:
        """Whether the median step time lies outside the predicted interval."""
        if self.seconds is None or self.low_seconds is None or self.high_seconds is None:
            return False
        return not self.low_seconds <= self.seconds <= self.high_seconds


COLUMNS = (
    Column("id", "text"),
    Column("folder", "text"),
    Column("name", "text"),
    Column("state", "text"),
    Column("started", "time"),
    Column("ended", "time"),
    Column("model", "text"),
    Column("machine", "text"),
    Column("host", "text"),
    Column("site", "text"),
    Column("group", "text"),
    Column("parent", "text"),
    Column("attempts", "count"),
    Column("ranks", "count"),
    Column("step", "count"),
    Column("steps", "count"),
    Column("loss", "number"),
    Column("held_out_loss", "number"),
    Column("metric", "text"),
    Column("metric_value", "number"),
    Column("seconds", "seconds"),
    Column("predicted_seconds", "seconds"),
    Column("low_seconds", "seconds"),
    Column("high_seconds", "seconds"),
    Column("memory_bytes", "bytes"),
    Column("tokens_per_second", "number"),
    Column("journal_bytes", "bytes"),
    Column("changes", "count"),
    Column("verdict", "text"),
    Column("archived", "flag"),
    Column("broken", "flag"),
    Column("tags", "json"),
    Column("notes", "json"),
    Column("faults", "json"),
    Column("kinds", "json"),
    Column("inputs", "json"),
    Column("settings", "json"),
)
"""The columns of the table of runs, in the order of the fields of `RunRow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Which runs, in which order."""

    filter: str | None = None
    """A condition such as `model = "gpt-tiny" and loss < 5`; None takes all runs."""
    sort: str = "id desc"
    """A column, a setting or a series, with ` desc` behind or `-` before it for the largest first;
    runs that lack it come last. `id desc` is newest first."""
    limit: int | None = None
    """Most rows; None gives all."""
    offset: int = 0
    """Rows to leave out first."""
    archived: bool | None = False
    """Only runs that are archived, or are not; None takes both."""
