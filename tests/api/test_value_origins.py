"""Where the values of a planned request come from."""

from pathlib import Path

from command_line import TINY
from windlass.jobs.options import value_origins
from windlass.jobs.planned import make_request, plan, request_origins


def test_every_value_names_its_line_override_default_or_the_planner(home: Path) -> None:
    path = home / "request.toml"
    path.write_text("[train]\nlearning_rate = 0.002\n")
    model, *overrides = TINY
    planned = plan(make_request(model, *overrides, machine="h100", file=path))

    given = request_origins(model, *overrides, machine="h100", file=path)
    values = {value.key: value for value in value_origins(planned, given)}

    assert values["train.learning_rate"].origin == f"{path}:2"
    assert values["batch.micro"].origin == "override `batch.micro=2`"
    assert values["train.weight_decay"].origin == "default"
    assert values["train.steps"].origin.startswith("default: ")
    assert values["parallel.pipeline"].origin == "planner"
    assert values["batch.accumulation"].value == str(planned.plan.batch.accumulation)
    assert "model.ffn" not in values
