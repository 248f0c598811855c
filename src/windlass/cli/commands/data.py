"""`windlass data`: what a text holds, before a model is trained on it."""

import json
from pathlib import Path

from windlass import api
from windlass.api import AsJson, split_overrides
from windlass.cli.console import ProgressBars, console, print_json, print_notes
from windlass.report import data_table


def data(*sources: str, file: Path | None = None, as_json: AsJson = False) -> None:
    """Tokenize a text, and show its size, sources, tokenizer and duplicates.

    For example: `windlass data books/ code.jsonl data.weights='[3, 1]' data.tokenizer=byte`.

    Args:
        sources: Texts in place of `data.source`, and `key=value` overrides such as
            `data.validation=held_out.txt`.
        file: A TOML file with a request; sources and overrides win over it.
        as_json: Print the statistics as JSON.
    """
    names, overrides = split_overrides(sources)
    if names:
        overrides = (*overrides, f"data.source={json.dumps(names, ensure_ascii=False)}")
    request = api.make_request(None, *overrides, file=file)
    with ProgressBars() as progress:
        statistics = api.data_statistics(request, progress=progress)
    print_notes(statistics.notes)
    if as_json:
        print_json(statistics)
    else:
        console.print(data_table(statistics))
