"""A plan becomes an engine's configuration by a file of data, and a configuration a plan by it."""

import pytest

from engine_plans import engine_plans, facts_of, graph_of, machine_of, refused_plans
from windlass.engines import (
    engine_versions,
    load_engine,
    plan_of_facts,
    read_engine_config,
    translate,
)
from windlass.errors import RequestError
from windlass.schema import ModelIdentity
from windlass.stacks import load_stack

ENGINES = tuple(engine_versions())


@pytest.mark.parametrize("engine", ENGINES)
def test_twenty_plans_survive_the_way_to_a_configuration_and_back(engine: str) -> None:
    file, plans = load_engine(engine), engine_plans(engine)

    assert len(plans) >= 20
    for plan in plans:
        translation = translate(facts_of(plan), file)
        assert not translation.unsayable, plan
        config = read_engine_config(translation.files, file)
        assert not config.unread
        assert plan.model is not None
        graph, machine = graph_of(plan.model.name), machine_of(plan.parallel.devices // 8)
        assert plan_of_facts(config.facts, graph, machine, engine, plan.model) == plan


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_cannot_say_is_refused_for_that_field_with_a_reason(engine: str) -> None:
    file, refused = load_engine(engine), refused_plans(engine)

    assert len(refused) >= 5
    for field, plan in refused:
        unsayable = translate(facts_of(plan), file).unsayable
        assert field in {each.fact for each in unsayable}, plan
        assert all(each.because for each in unsayable), unsayable


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_is_a_stack_whose_costs_price_it(engine: str) -> None:
    stack = load_stack(engine)

    assert stack.name == engine


def test_a_version_without_a_file_is_refused_and_the_nearest_is_named() -> None:
    with pytest.raises(RequestError, match=r"nearest known is `torchtitan@0\.3\.0`"):
        load_engine("torchtitan@0.2.1")


def test_an_unknown_engine_names_the_nearest_word() -> None:
    with pytest.raises(RequestError, match="did you mean `torchtitan`"):
        load_engine("torchtitna")


def test_keys_that_no_row_explains_are_named() -> None:
    engine = load_engine("torchtitan")
    text = "--training.seq_len=2048 --comm.mode=fake_backend --training.local_batch_size 2"

    config = read_engine_config({"train.args": text}, engine)

    assert config.unread == ("train.args: `comm.mode`",)
    assert (config.facts["batch.sequence"], config.facts["batch.local"]) == (2048, 2)


def test_a_configuration_that_leaves_degrees_open_has_the_engines_own_defaults() -> None:
    engine = load_engine("torchtitan")
    text = "--training.seq_len 2048 --training.local_batch_size=2 --training.global_batch_size=64"

    facts = read_engine_config({"train.args": text}, engine).facts
    plan = plan_of_facts(
        facts, graph_of("llama3-8b"), machine_of(2), "torchtitan", ModelIdentity(name="llama3-8b")
    )

    assert (plan.parallel.data, plan.sharding.parameters, plan.batch.accumulation) == (16, 16, 2)
    assert plan.recompute == "selective"
