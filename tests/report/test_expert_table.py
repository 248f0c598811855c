"""What is said of how busy experts were."""

from dataclasses import replace

from windlass.report.terminal.run_tables import describe_expert_load, expert_table
from windlass.schema.run_record import Step

STEP = Step(
    step=4, loss=1.0, gradient_norm=1.0, learning_rate=0.1, tokens=8, seconds=1.0, memory_bytes=1,
    expert_load={"block0.hidden.router": (4, 4, 4, 4), "block1.hidden.router": (12, 4, 0, 0)},
)  # fmt: skip


def test_one_line_names_the_busiest_expert_and_counts_the_idle_ones():
    assert describe_expert_load(STEP) == (
        "experts: the busiest, of block1, got 3.00 × an equal share; 2 of 8 got no token"
    )


def test_the_line_says_how_many_choices_found_no_room():
    line = describe_expert_load(replace(STEP, dropped_share=0.0213))
    assert line.endswith("2 of 8 got no token; 2.1 % of choices dropped")


def test_a_run_without_experts_has_no_table():
    assert expert_table([]) is None
    assert expert_table([STEP]) is not None
