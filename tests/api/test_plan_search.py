"""Defaults of a request that a search decides."""

from windlass import api


def test_the_default_batch_does_not_hang_on_pins_of_the_plan():
    where = {"machine": "a100-40gb", "memory": "1.62GiB"}
    batch = api.plan("gpt-tiny", **where, cache=False).request.train.batch
    assert batch == 4  # the usual 16 does not fit
    pinned = api.plan("gpt-tiny", "recompute=selective", **where, cache=False)
    assert pinned.request.train.batch == batch
