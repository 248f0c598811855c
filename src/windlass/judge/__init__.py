"""Judges runs: expected, slow or broken, what differs between them, and why."""

from windlass.judge.arm_comparison import (
    BUDGET_NAMES, Arm, ArmCurve, Band, Budget, Comparison, arm_sentence, band, compare_arms,
    comparison_sentence, relation,
)  # fmt: skip
from windlass.judge.change_points import stall_share
from windlass.judge.delta_debugging import TestResult, find_culprits
from windlass.judge.evidence import (
    Curve, DocumentCounts, Evidence, HostLoad, Peer, PredictedTime, RankTimes,
)  # fmt: skip
from windlass.judge.moderated_t import (
    DEFAULT_PRIOR, NoisePrior, fit_noise_prior, moderated_t, robust_deviation,
)  # fmt: skip
from windlass.judge.run_diff import (
    NoiseFloor, ResultDifference, RunDiff, diff_runs, flat_keys, noise_floor, with_keys_of,
)  # fmt: skip
from windlass.judge.verdict import Verdict, judge

__all__ = [
    "BUDGET_NAMES", "DEFAULT_PRIOR", "Arm", "ArmCurve", "Band", "Budget", "Comparison", "Curve",
    "DocumentCounts", "Evidence", "HostLoad", "NoiseFloor", "NoisePrior", "Peer", "PredictedTime",
    "RankTimes", "ResultDifference", "RunDiff", "TestResult", "Verdict", "arm_sentence", "band",
    "compare_arms", "comparison_sentence", "diff_runs", "find_culprits", "fit_noise_prior",
    "flat_keys", "judge", "moderated_t", "noise_floor", "relation", "robust_deviation",
    "stall_share", "with_keys_of",
]  # fmt: skip
