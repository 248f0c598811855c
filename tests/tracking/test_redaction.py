"""Texts that are sent to others name neither a person nor a machine."""

import getpass
import socket
from pathlib import Path

import pytest

from windlass.tracking import without_personal_data


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("no file `/home/alice/run/plan.toml`", "no file `<path>`"),
        ("~/models is full", "<path> is full"),
        ("see ../alice/x.log, line 3", "see <path>, line 3"),
        ("12 GB/s and 3/4 of 2e9 FLOP/s", "12 GB/s and 3/4 of 2e9 FLOP/s"),
        ("float32 / bfloat16", "float32 / bfloat16"),
        ("cuda:0 out of memory. Tried 2.00 GiB", "cuda:0 out of memory. Tried 2.00 GiB"),
    ],
)
def test_paths_are_replaced_and_figures_stay(text: str, result: str):
    assert without_personal_data(text) == result


def test_this_host_its_user_and_home_are_replaced():
    user, host = getpass.getuser(), socket.gethostname()
    text = without_personal_data(f"{user}@{host} in {Path.home()}")
    assert text == "<user>@<host> in <path>"
