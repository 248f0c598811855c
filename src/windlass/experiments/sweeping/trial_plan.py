"""What one trial of a sweep runs: its request, planned for its share of this machine."""

from windlass.errors import MachineError
from windlass.hardware import core_count
from windlass.jobs import HERE, NO_OBJECTS, Planned, find_machine, plan_request
from windlass.schema import Machine, Request
from windlass.sweep import SweepRequest, Trial


def plan_trial(request: SweepRequest, trial: Trial) -> Planned:
    """The plan of a trial, for the cores that it has while the other jobs run beside it.

    Args:
        request: the sweep, with the number of its jobs.
        trial: one of its trials.

    Raises:
        WindlassError: what is wrong with its request; the result says if nothing fits.
    """
    asked = Request.resolve(None, request.overrides(trial.params))
    if asked.machine != HERE:
        raise MachineError(
            f"a sweep runs on this machine (`{HERE}`) or through Slurm, not on `{asked.machine}`; "
            "leave out `machine`"
        )
    jobs = (request.jobs or 1) if request.executor == "local" else 1
    return plan_request(asked, NO_OBJECTS, None, here=share_of(find_machine(HERE), jobs))


def share_of(machine: Machine, jobs: int) -> Machine:
    """This machine as one of several equal jobs finds it: a part of the cores and rates.

    The memory is all of it, as packing sees to it that the jobs together have enough.
    """
    if jobs == 1 or machine.device.kind != "cpu":
        return machine
    whole = machine.device.memory
    share = machine.device.split(jobs, cores=core_count())
    memory = share.memory.model_copy(update={"capacity_bytes": whole.capacity_bytes})
    device = share.model_copy(update={"tiers": (memory, *share.tiers[1:])})
    return machine.model_copy(update={"device": device})
