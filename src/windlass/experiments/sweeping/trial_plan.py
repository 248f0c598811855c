"""What one trial of a sweep runs: its request, planned for its share of this machine."""

from contextlib import suppress

from windlass.errors import MachineError, WindlassError
from windlass.hardware import core_count
from windlass.jobs import HERE, NO_OBJECTS, Planned, Progress, find_machine, plan_request
from windlass.schema import Machine, Request
from windlass.sweep import SweepRequest, Trial, end_points


def measured_machine(request: SweepRequest, progress: Progress | None) -> Machine:
    """This machine, measured for what the trials of a sweep need, before any of them runs.

    Each model, precision and length of a run at the ends of the space is planned, as planning finds
    out what it needs.

    Args:
        request: the sweep.
        progress: called with how far a measurement is.

    Raises:
        MachineError: this machine cannot be measured.
    """
    points = (request.overrides(point) for point in end_points(request.dimensions()))
    for asked in {_cost_keys(one): one for one in map(_request_at, points)}.values():
        # What is wrong with one trial, it says itself.
        with suppress(WindlassError):
            plan_request(asked, NO_OBJECTS, progress)
    return find_machine(HERE, progress=progress)


def _request_at(overrides: tuple[str, ...]) -> Request:
    return Request.resolve(None, overrides)


def _cost_keys(request: Request) -> str:
    """What the time of a run, and the parts of a machine that its plans need, depend on."""
    train = request.train.model_dump(include={"steps", "batch", "sequence", "optimizer", "frozen"})
    return f"{request.model_dump_json(exclude={'train'})} {train}"


def plan_trial(request: SweepRequest, trial: Trial) -> Planned:
    """The plan of a trial, for the cores that it has while the other jobs run beside it.

    Args:
        request: the sweep, with the number of its jobs.
        trial: one of its trials.

    Raises:
        WindlassError: what is wrong with its request; the result says if nothing fits.
    """
    asked = _request_at(request.overrides(trial.params))
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
