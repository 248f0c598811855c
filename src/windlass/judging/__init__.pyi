from .differences.bisection import Bisection, bisect
from .differences.code_versions import recorded_code
from .differences.run_diff import diff
from .seed_noise import Noise, noise
from .verdicts import LiveJudge, follow_verdict, judge, require_alert, send_alert

__all__ = [
    "Bisection", "LiveJudge", "Noise", "bisect", "diff", "follow_verdict", "judge", "noise",
    "recorded_code", "require_alert", "send_alert",
]  # fmt: skip
