"""The stores at which ranks and watchdogs meet."""

import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, Store

from windlass.runtime.distributed.rendezvous import (
    HeadAddress,
    connect_store,
    create_store_file,
    host_store,
)
from windlass.runtime.distributed.status_store import RankStatus, StatusStore

STATUS = RankStatus(3, 7, 0, stopped=False, finished=False)


@pytest.fixture
def free_address() -> HeadAddress:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return HeadAddress("127.0.0.1", int(listener.getsockname()[1]))


def test_only_their_user_can_enter_the_folder_where_the_ranks_of_one_host_meet(tmp_path: Path):
    (tmp_path / "store").mkdir(mode=0o777)  # left over, or put there by somebody else
    file = create_store_file(tmp_path)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    store, other = connect_store(file, "1"), connect_store(file, "1")
    with ThreadPoolExecutor() as threads:
        received = threads.submit(other.get, "key")
        store.set("key", "value")
        assert received.result(timeout=30) == b"value"
    assert not connect_store(file, "2").check(["key"])


def watchdogs(address: HeadAddress) -> tuple[StatusStore, StatusStore]:
    """The watchdogs of two hosts with one rank each."""

    def connect() -> Store:
        return connect_store(address, "secret")

    one, other = (StatusStore(connect, host, 2, [host], interval_seconds=0.02) for host in range(2))
    one.publish({0: STATUS})
    other.publish({1: STATUS})
    return one, other


def test_all_hosts_agree_on_the_first_failure_and_know_that_all_know(free_address: HeadAddress):
    store, threads = host_store(free_address), set(threading.enumerate())
    one, other = watchdogs(free_address)
    assert one.agree_on_failure("first", 30) == "first"
    assert other.agree_on_failure("second", 30) == "first"
    one.wait_until_all_know(30)
    assert int(PrefixStore("secret", store).get("acknowledged")) == 2
    other.close()
    one.close()
    assert set(threading.enumerate()) == threads


def test_a_status_that_is_garbage_counts_as_silence(free_address: HeadAddress):
    store = host_store(free_address)
    one, other = watchdogs(free_address)
    one._wait_until(lambda: one.statuses == {0: STATUS, 1: STATUS}, 30)
    other.close()
    for garbage in ("", "\x80", "[]", "[1, 2]", '[1, [["a"]]]', "null"):
        PrefixStore("secret", store).set("1", garbage)
        one.exchange(30)
    assert one.connection_error is None
    assert one.statuses == {0: STATUS, 1: STATUS}
    assert one.seconds_since_heard()[1] > 0
    one.close()
