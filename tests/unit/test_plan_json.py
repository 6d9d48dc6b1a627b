"""A plan survives being written down; what is not a plan is refused with the path to the fault."""

import json
from typing import Any

import pytest

from ringreduce.plan import BUILDERS, Plan, PlanError, build

ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_plans_load_back_equal(collective: str, algorithm: str) -> None:
    for size in (1, 2, 5):
        plan = build(collective, algorithm, size)
        assert Plan.from_json(plan.to_json()) == plan


def document() -> Any:
    return json.loads(build("all_reduce", "one_shot", 2).to_json())


STEP = "plan.channels[0].programs[1][1]"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("size",), "2", "plan.size is '2'; expected an integer"),
        (("size",), True, "plan.size is True; expected an integer"),
        (("name",), 7, "plan.name is 7; expected a string"),
        (("collective",), "sum", "plan.collective is 'sum'; expected one of all_reduce,"),
        (("colour",), "red", "plan.colour is unknown (value 'red'); remove it: expected an object with the keys name,"),
        (("channels",), {}, "plan.channels is {}; expected a list"),
        (("channels", 0), [], "plan.channels[0] is []; expected an object with the keys share, chunks, programs"),
        (("channels", 0, "share"), 1.0, "plan.channels[0].share is 1.0; expected an integer"),
        (("channels", 0, "programs", 1), None, "plan.channels[0].programs[1] is None; expected a list"),
        (("channels", 0, "programs", 1, 1, "read"), "inptu", f"{STEP}.read is 'inptu'; expected one of none, input"),
        (("channels", 0, "programs", 1, 1, "read"), [], f"{STEP}.read is []; expected one of"),
        (("channels", 0, "programs", 1, 1, "write"), 1, f"{STEP}.write is 1; expected true or false"),
        (("channels", 0, "programs", 1, 1, "recv"), [0, "1"], f"{STEP}.recv[1] is '1'; expected an integer"),
        (("channels", 0, "programs", 1, 1, "sned"), [], f"{STEP}.sned is unknown"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str | int, ...], value: object, message: str) -> None:
    plan = document()
    parent = plan
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(plan))
    assert message in str(caught.value)


def test_a_missing_field_is_named() -> None:
    plan = document()
    del plan["channels"][0]["programs"][0][0]["send"]
    with pytest.raises(PlanError, match=r"plan\.channels\[0\]\.programs\[0\]\[0\]\.send is missing"):
        Plan.from_json(json.dumps(plan))


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_plan_at_all_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="plan"):
        Plan.from_json(text)
