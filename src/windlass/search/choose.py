"""Choose: the plan whose whole run is predicted to end first, of those that fit."""

from collections.abc import Sequence

from windlass.cost.predict import predict
from windlass.errors import Faults
from windlass.search.advise import advise
from windlass.search.among import choose_among
from windlass.search.choice import Choice
from windlass.search.fewest import fewest
from windlass.search.ranked import refusal, run_seconds, runner_up
from windlass.search.sieve import Sieved, sieve, undominated
from windlass.search.space import impossible, plans, stays_whole, vary
from windlass.search.streamed import streamed_plans
from windlass.search.weigh import weigh, with_near
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan
from windlass.spec.prediction import Prediction
from windlass.spec.request import Request

_RUNNERS_UP = 5

_Weighed = tuple[Plan, Prediction]


def choose(request: Request, graph: Graph, machine: Machine) -> Choice:
    """The plan that ends the run first, and why not another.

    The run is `train.steps` steps and, where the plan compiles, the compilation before them.

    Args:
        request: what is wanted; whatever it pins is held.
        graph: captured from the request's model.
        machine: to run on; `request.near` takes the place of its near tier's capacity.

    Returns:
        A choice with a plan, or with advice if nothing fits.

    Raises:
        Faults: the request asks for what cannot be.
    """
    if machine.devices > 1:
        if wrong := tuple(impossible(request, graph, machine)):
            raise Faults(wrong)
        return choose_among(request, graph, machine)
    near_bytes = request.near or machine.device.near.capacity_bytes
    candidates = _candidates(request, graph, machine)
    sieved = sieve(candidates, graph, machine, near_bytes)
    if not sieved.fitting and request.phases is None and not stays_whole(request):
        # What fits whole is never slower than in phases, so those are asked for only now.
        streamed = streamed_plans(request, graph, machine)
        candidates += streamed
        turned = sieve(streamed, graph, machine, near_bytes)
        sieved = Sieved(fitting=turned.fitting, refused=(*turned.refused, *sieved.refused))
    refused = tuple(refusal(*item, near_bytes) for item in sieved.refused)
    if not sieved.fitting:
        advice = advise(request, graph, machine, sieved.refused)
        return Choice(
            plan=None, prediction=None, refused=refused, advice=advice, weighed=len(candidates)
        )
    steps = request.train.steps
    able = undominated(sieved.fitting)
    if request.recompute is None and request.recomputed is None:
        able = (each for plan in able for each in _spared(plan, graph, machine, near_bytes))
    weighed = [(plan, weigh(plan, graph, machine, near_bytes=near_bytes)) for plan in able]
    best, _ = min(weighed, key=lambda item: _rank(item, steps))
    weighed += _recomputing(best, sieved.fitting, graph, machine, near_bytes)
    weighed.sort(key=lambda item: _rank(item, steps))
    plan, short = weighed[0]
    # The winner's own program, whole: the same numbers, told of the program that will run.
    prediction = with_near(predict(plan, graph, machine), near_bytes)
    return Choice(
        plan=plan,
        prediction=prediction,
        run_seconds=run_seconds(prediction, steps),
        runners_up=tuple(runner_up((plan, short), item, steps) for item in _runners_up(weighed)),
        refused=refused,
        weighed=len(candidates),
    )


def _candidates(request: Request, graph: Graph, machine: Machine) -> tuple[Plan, ...]:
    """The plans that the request leaves open, streamed ones only if it asks for phases."""
    if request.phases is None or request.phases == 1:
        return plans(request, graph, machine)
    return streamed_plans(request, graph, machine)


def _spared(plan: Plan, graph: Graph, machine: Machine, near_bytes: int) -> tuple[Plan, ...]:
    """The plan with only as much recomputed as it takes, in each way that there is."""
    if plan.streamed or plan.recompute == "none":
        return (plan,)
    return fewest(plan, graph, machine, near_bytes)


def _runners_up(weighed: Sequence[_Weighed]) -> list[_Weighed]:
    """The next best, and the best with another precision, mode or recompute if not among them."""
    shown = list(weighed[1 : _RUNNERS_UP + 1])
    best = weighed[0][0]
    for trait in (_precision, _compile, _recompute, _phases):
        other = next((item for item in weighed if trait(item[0]) != trait(best)), None)
        if other is not None and other not in shown:
            shown.append(other)
    return shown


def _precision(plan: Plan) -> str:
    return plan.precision


def _compile(plan: Plan) -> bool:
    return plan.compile


def _recompute(plan: Plan) -> str:
    return plan.recompute


def _phases(plan: Plan) -> str:
    return str(len(plan.stages[0].phases))


def _rank(item: _Weighed, steps: int) -> tuple[float, int, int]:
    """Faster first; then the emptier near tier, then the larger micro-batch."""
    plan, prediction = item
    return run_seconds(prediction, steps), prediction.peaks[0].peak_bytes, -plan.batch.micro


def _recomputing(
    best: Plan, fitting: Sequence[Plan], graph: Graph, machine: Machine, near_bytes: int
) -> list[_Weighed]:
    """The best plan with recompute, if it was open: users ask what recompute would cost."""
    if best.streamed:
        return []
    twin = vary(best, recompute="layer")
    if twin == best or twin not in fitting:
        return []
    return [(twin, weigh(twin, graph, machine, near_bytes=near_bytes))]
