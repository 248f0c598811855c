"""`windlass plan`: the ten lines of its answer, and what stands behind its flags."""

import json

import pytest

from command_line import Windlass

LLAMA = ("llama3-8b", "--on", "dgx-h100:8", "--stack", "torchtitan")


def test_the_first_ten_lines_say_what_to_launch_what_it_costs_and_why(windlass: Windlass):
    done = windlass("plan", *LLAMA)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[:10]
    headings = [line.split()[0] for line in first[1:]]
    wanted = ["plan", "batch", "layers", "step", "memory", "cost", "why", "next", "fastest"]
    assert headings == wanted
    assert "every figure is predicted" in first[0]
    text = "\n".join(first)
    for words in (
        "PP=", "TP=", "DP=", "reshard_after_forward=", "micro-batch ", "recompute ", "tokens/s/GPU",
        "MFU ", " of 74.5 GiB", "chance to run out ", "GPU-hours", "bound by ", "`--margin 0`",
    ):  # fmt: skip
        assert words in text, words


def test_reasons_and_runners_up_stand_behind_flags_and_json_has_all(windlass: Windlass):
    plain = windlass("plan", *LLAMA).stdout
    reasons, rivals = (windlass("plan", *LLAMA, each).stdout for each in ("--why", "--runners-up"))
    told = json.loads(windlass("plan", *LLAMA, "--json").stdout)
    assert len(plain.splitlines()) <= 14
    assert "predicted step time by term" in reasons
    assert "runners-up, all" not in reasons
    assert "searched parallel.pipeline" in reasons
    assert "runners-up, all numbers predicted" in rivals
    assert "by term" not in rivals
    assert told["fastest"]["differs"]
    assert told["runners_up"]
    assert told["prediction"]["by_term"]


@pytest.mark.parametrize("margin", ["0", "0%"])
def test_without_a_margin_the_proved_fastest_plan_is_chosen(windlass: Windlass, margin: str):
    proved = json.loads(windlass("plan", *LLAMA, "--json").stdout)["fastest"]["plan"]
    told = json.loads(windlass("plan", *LLAMA, "--margin", margin, "--json").stdout)
    assert told["fastest"] is None
    assert told["plan"]["parallel"] == proved["parallel"]


def test_a_margin_that_is_no_share_is_refused(windlass: Windlass):
    done = windlass("plan", "gpt-tiny", "--on", "h100", "--margin", "wide")
    assert done.returncode == 2
    assert "margin" in done.stderr
