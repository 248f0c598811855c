"""Which rank never joined a collective, from the flight records of all."""

from typing import Any

from windlass.runtime.distributed.failure_report import never_joined


def record(*numbers: int, group: str = "1", is_p2p: bool = False) -> dict[str, Any]:
    entries = [
        {
            "process_group": [group, "fsdp"], "collective_seq_id": number, "is_p2p": is_p2p,
            "profiling_name": "nccl:all_gather" if number % 2 else "nccl:reduce_scatter",
        }
        for number in numbers
    ]  # fmt: skip
    return {"entries": entries}


def test_the_rank_that_is_behind_in_a_group_is_named_with_the_collective_it_lacks() -> None:
    rank, words = never_joined({0: record(1, 2, 3), 1: record(1, 2), 2: record(1, 2, 3)}) or (9, "")
    assert rank == 1
    assert words == (
        "it never joined `nccl:all_gather`, collective 3 of its group, in which rank 0, 2 waits"
    )


def test_ranks_that_have_joined_alike_and_messages_between_two_name_nobody() -> None:
    assert never_joined({0: record(1, 2), 1: record(2)}) is None
    assert never_joined({0: record(1, 2, is_p2p=True), 1: record(1, is_p2p=True)}) is None
    assert never_joined({0: record(4), 1: record(2, group="2"), 2: {}}) is None
