from dataclasses import replace

import numpy as np
import pytest
from made_runs import KINDS, LOSS_NOISE, evidence, steps_of

from windlass.judge import Curve, DocumentCounts, PredictedTime, judge


def test_a_healthy_run_is_expected():
    verdict = judge(evidence())
    assert verdict.level == "expected", verdict
    assert verdict.peers == 12


@pytest.mark.parametrize("peers", [0, 1, 2])
def test_with_fewer_than_three_peers_the_verdict_is_unknown_and_says_how_many(peers: int):
    verdict = judge(evidence(peers=peers))
    assert verdict.level == "unknown"
    assert verdict.sentences[0] == ("no peers", "only 1 peer", "only 2 peers")[peers]


def test_healthy_runs_raise_no_more_false_alarms_than_three_of_three_hundred():
    alarms = [judge(evidence(seed=seed, count=60)).is_alarm for seed in range(100, 200)]
    assert sum(alarms) <= 1


def late_rank(rank: int, kinds: dict[str, np.ndarray]) -> None:
    """Rank 3 computes 40 ms longer from step 61 on, and the others wait for it."""
    if rank == 3:
        kinds["backward"][60:] += 0.04
    else:
        kinds["reduce_grads"][60:] += 0.04


def test_a_rank_that_computes_longer_is_named_with_its_lateness_and_its_step():
    verdict = judge(evidence(change=late_rank))
    assert (verdict.level, verdict.cause, verdict.ranks) == ("slow", "rank", (3,))
    assert verdict.since_step is not None
    assert abs(verdict.since_step - 61) <= 3
    assert "rank 3 (stage 1, tensor 0, data 1) arrives" in verdict.sentences[1]
    assert "compute, not link" in verdict.sentences[1]


def test_a_rank_that_was_late_from_the_start_is_found_beside_peers():
    def change(rank: int, kinds: dict[str, np.ndarray]) -> None:
        kinds["backward" if rank == 2 else "reduce_grads"][:] += 0.03

    verdict = judge(evidence(change=change))
    assert (verdict.level, verdict.cause, verdict.ranks) == ("slow", "rank", (2,))
    assert verdict.since_step is None
    assert verdict.magnitude == pytest.approx(0.03 / sum(KINDS.values()), abs=0.05)


def test_messages_that_take_longer_between_two_stages_are_a_slow_link():
    def change(_rank: int, kinds: dict[str, np.ndarray]) -> None:
        kinds["receive"][60:] += 0.03

    verdict = judge(evidence(change=change))
    assert (verdict.level, verdict.cause, verdict.kind) == ("slow", "link", "receive")
    assert "link, not compute" in verdict.sentences[1]


def test_transfers_that_take_longer_are_a_slow_tier():
    def change(_rank: int, kinds: dict[str, np.ndarray]) -> None:
        kinds["update"] = np.full(len(kinds["forward"]), 0.01)
        kinds["update"][60:] += 0.03

    verdict = judge(evidence(change=change, tiers={"update": "disk"}))
    assert (verdict.level, verdict.cause, verdict.tier) == ("slow", "tier", "disk")


def test_a_slowdown_that_is_over_is_no_alarm():
    def change(_rank: int, kinds: dict[str, np.ndarray]) -> None:
        kinds["forward"][40:80] += 0.05

    assert judge(evidence(change=change, count=300)).level == "expected"


def test_a_gradient_norm_twice_as_large_on_two_replicas_is_a_sum_in_place_of_a_mean():
    def double(curves: dict[str, Curve]) -> None:
        norm = curves["gradient_norm"]
        curves["gradient_norm"] = Curve(norm.steps, 2 * norm.values)

    verdict = judge(evidence(curves=double))
    assert (verdict.level, verdict.quantity) == ("broken", "gradient norm")
    assert any("a sum in place of a mean" in sentence for sentence in verdict.sentences)


def test_a_loss_that_leaves_the_band_of_its_peers_is_broken_from_that_step_on():
    def worse(curves: dict[str, Curve]) -> None:
        loss = curves["loss"]
        factor = np.where(loss.steps > 60, 1 + 10 * LOSS_NOISE, 1)
        rate = curves["learning_rate"]
        curves["loss"] = Curve(loss.steps, loss.values * factor)
        curves["learning_rate"] = Curve(rate.steps, 3 * rate.values)

    verdict = judge(evidence(curves=worse))
    assert (verdict.level, verdict.quantity) == ("broken", "loss")
    assert verdict.since_step is not None
    assert verdict.since_step > 60
    assert "the learning rate is 3 times that of its peers" in verdict.sentences


def test_documents_that_go_with_a_high_loss_are_named():
    counts = np.random.default_rng(5).poisson(2.0, (120, 6)).astype(float)

    def corrupted(curves: dict[str, Curve]) -> None:
        loss = curves["loss"]
        curves["loss"] = Curve(loss.steps, loss.values + 0.3 * counts[:, 4])

    names = tuple(f"shard{index}.txt" for index in range(6))
    documents = DocumentCounts(steps_of(120), names, counts)
    verdict = judge(evidence(curves=corrupted, documents=documents))
    assert verdict.level == "broken"
    assert verdict.documents == ("shard4.txt",)


def test_a_spike_of_the_loss_is_told_without_peers():
    def spike(curves: dict[str, Curve]) -> None:
        curves["loss"].values[80:84] *= 1.5

    verdict = judge(evidence(peers=0, curves=spike))
    assert (verdict.level, verdict.quantity, verdict.since_step) == ("broken", "loss", 81)
    assert verdict.spike == (81, 84)


def test_a_loss_that_stays_high_is_no_spike():
    def diverge(curves: dict[str, Curve]) -> None:
        curves["loss"].values[80:] *= np.linspace(1.5, 9, len(curves["loss"].values) - 80)

    verdict = judge(evidence(peers=0, curves=diverge))
    assert (verdict.level, verdict.spike) == ("broken", None)


def nearly_zero(curves: dict[str, Curve]) -> None:
    """One of 64 images is wrong now and then, as in a run of digits that has learned them all."""
    rng, steps = np.random.default_rng(11), curves["loss"].steps
    wrong = np.where(rng.random(len(steps)) < 0.05, rng.uniform(2, 9, len(steps)) / 64, 0.0)
    curves["loss"] = Curve(steps, 2e-4 * np.exp(rng.normal(0, 0.3, len(steps))) + wrong)


@pytest.mark.parametrize("peers", [0, 12])
def test_a_loss_near_zero_in_which_single_targets_are_wrong_is_not_broken(peers: int):
    low = evidence(peers=peers, curves=nearly_zero, targets=64)
    low = replace(low, peers=tuple(replace(peer, curves=low.curves) for peer in low.peers))
    assert judge(low).level in ("expected", "unknown")
    assert judge(replace(low, targets=None)).quantity == "loss"


def test_a_loss_near_zero_that_forgets_what_it_learned_is_broken():
    def forget(curves: dict[str, Curve]) -> None:
        nearly_zero(curves)
        curves["loss"].values[80:] += 0.5

    verdict = judge(evidence(peers=0, curves=forget, targets=64))
    assert (verdict.level, verdict.quantity, verdict.since_step) == ("broken", "loss", 81)


def test_a_loss_that_is_no_number_is_broken_at_its_step():
    def overflow(curves: dict[str, Curve]) -> None:
        curves["loss"].values[70] = np.nan

    verdict = judge(evidence(curves=overflow))
    assert (verdict.level, verdict.since_step) == ("broken", 71)


def test_without_peers_a_run_far_beyond_its_prediction_is_slow_where_predictions_are_good():
    late = PredictedTime(0.05, 0.045, 0.055)
    slow = judge(evidence(peers=0, predicted=late, residuals=(0.0, 0.05, -0.05, 0.02)))
    unsure = judge(evidence(peers=0, predicted=late, residuals=(0.9, -0.6, 0.3, 1.2)))
    alone = judge(evidence(peers=0, predicted=late))
    assert slow.level == "slow"
    assert "predicted" in slow.sentences[0]
    assert (unsure.level, alone.level) == ("unknown", "unknown")
    assert "2.00 times what was predicted" in alone.sentences[1]
