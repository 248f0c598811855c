"""What ends a command: limits of the machine are told from bugs."""

import errno
import os

import pytest

from windlass.errors import describe_limit


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.EMFILE, "Too many open files", "x"), "raise that by `ulimit -n 4096`"),
        (OSError(errno.ENFILE, "Too many open files in system"), "`ulimit -n 4096`"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory ran out"),
        (MemoryError(), "memory ran out"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory ran"),
        (RuntimeError("can't start new thread"), "raise that by `ulimit -u`"),
    ],
)
def test_a_limit_of_the_machine_is_a_sentence_with_the_way_out_also_behind_another_error(
    error: BaseException, sentence: str
) -> None:
    behind = RuntimeError("the step failed")
    behind.__cause__ = error
    for each in (error, behind):
        assert sentence in (describe_limit(each) or "")


@pytest.mark.parametrize("error", [ValueError("memory"), KeyError("x"), OSError(errno.EIO, "x")])
def test_any_other_error_is_no_limit(error: BaseException) -> None:
    assert describe_limit(error) is None
