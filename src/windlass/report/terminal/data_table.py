"""The tables of `windlass data`: sources, and what is worth knowing before training on them."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.terminal.tables import fact_table
from windlass.units import format_bytes, format_count

if TYPE_CHECKING:
    from windlass.data import DatasetStatistics


def data_table(statistics: "DatasetStatistics") -> RenderableType:
    """Documents, bytes and tokens of each source and of the held-out text, and their quality."""
    return Group(_sources(statistics), _facts(statistics))


def _sources(statistics: "DatasetStatistics") -> Table:
    train, held_out = statistics.meta.train, statistics.meta.held_out
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("text", overflow="fold")
    for name in ("documents", "size", "tokens", "of sequences"):
        table.add_column(name, justify="right")
    for part, share in zip(train.sources, statistics.shares, strict=True):
        table.add_row(
            Text(part.source), f"{part.documents:,}", format_bytes(part.nbytes),
            format_count(part.tokens), f"{100 * share:.3g} %",
        )  # fmt: skip
    table.add_row(
        Text(f"held out of {held_out.source}", style="dim"), f"{held_out.documents:,}",
        format_bytes(held_out.nbytes), format_count(held_out.tokens), "",
    )  # fmt: skip
    return table


def _facts(statistics: "DatasetStatistics") -> Table:
    meta = statistics.meta
    shortest, median, high, longest = statistics.document_tokens
    facts = {
        "tokenizer": f"{meta.vocabulary:,} entries, {meta.unused_entries:,} of which never occur "
        f"in training; {meta.bytes_per_token:.2f} bytes a token",
        "documents": f"{shortest:,} to {longest:,} tokens, half of them at most {median:,}, "
        f"95 % at most {high:,}",
        "duplicates": f"{meta.train.duplicates:,} of {meta.train.documents:,} in training; "
        f"{meta.held_out_in_training:,} of {meta.held_out.documents:,} held-out documents are also "
        "trained on",
        "baseline": "knowing only the tokens' frequencies, the held-out loss is "
        f"{meta.held_out_unigram_nats:.3f} ({meta.held_out_unigram_bits_per_byte:.3f} bits per "
        "byte)",
        "fingerprint": statistics.tokens_fingerprint,
    }
    if meta.chat_template is not None:
        learned = (meta.train.targets or 0) / meta.train.tokens
        facts["answers"] = (
            f"{100 * learned:.3g} % of the training tokens; chat template {meta.chat_template}"
        )
    table = fact_table()
    for name, words in facts.items():
        table.add_row(name, Text(words))
    return table
