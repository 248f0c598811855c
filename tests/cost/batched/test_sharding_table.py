"""Plans that share kinds of sharding options, against the same plans alone."""

import random

import numpy as np
import pytest

from cost.batched.test_evaluate_batch import BESIDE, GRAPHS, WITH_HOSTS, draw, parts
from windlass.cost.batched.config_keys import ComputeConfig, ShardingOption
from windlass.cost.batched.evaluate_batch import ExchangeKinds, evaluate_batch
from windlass.cost.batched.plan_table import PlanTable

ROUNDING = 1e-12
"""Relative. Sums of the same numbers, at times in another order."""
PAIRS = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4))


def test_plans_evaluated_together_take_what_each_takes_alone():
    chance = random.Random(7)
    for _ in range(20):
        graph, machine = chance.choice(GRAPHS), chance.choice((*BESIDE, *WITH_HOSTS))
        chain, shape, ends, rows = parts(draw(chance, graph, machine), graph, machine)
        (block,), (run,) = rows.blocks, rows.configs
        homes = [tier.name for tier in machine.device.tiers]
        pairs = tuple(ShardingOption(*pair, home) for pair in PAIRS for home in homes)
        block = block._replace(replicas=4, options=pairs)
        more = 2 * run.microbatches if shape.repeats else run.microbatches
        settings = [run.layer._replace(replicas=4, compiled=each) for each in (False, True)]
        able = settings[: 1 if shape.schedule == "zero-bubble" else 2]
        runs = [
            ComputeConfig(each, run.recompute, count)
            for each in able
            for count in {run.microbatches, more}
        ]
        rows = PlanTable.of([(block, runs)])
        found = evaluate_batch(chain, shape, ends, rows).step_seconds
        alone = [
            evaluate_batch(chain, shape, ends, rows.one(at)).step_seconds[0]
            for at in range(len(found))
        ]
        assert found == pytest.approx(np.array(alone), rel=ROUNDING)
        assert len(ExchangeKinds.of(chain, rows).pairs) <= len(PAIRS)
