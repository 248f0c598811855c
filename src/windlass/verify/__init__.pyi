from .check import FaultResult, Verifier, verification
from .local_validation.validated_run import (
    RUN_FOLDER, Measurement, ValidatedRun, measure_plan, run_isolated, validate_random_plans,
    validated_runs_file,
)  # fmt: skip
from .proof_scope import ProofScope, proof_scope, proof_steps
from .rehearse import MAX_PROCESSES, downscale_plan, rehearsal, rehearse_as_is

__all__ = [
    "MAX_PROCESSES", "RUN_FOLDER", "FaultResult", "Measurement", "ProofScope", "ValidatedRun",
    "Verifier", "downscale_plan", "measure_plan", "proof_scope", "proof_steps", "rehearsal",
    "rehearse_as_is", "run_isolated", "validate_random_plans", "validated_runs_file",
    "verification",
]  # fmt: skip
