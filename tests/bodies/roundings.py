"""How often a plan rounds the values of 16-bit and 8-bit floats."""

from collections.abc import Hashable

from ringreduce.plan import Plan, slot_depth
from ringreduce.plan.symbolic import Machine


class _Counting(Machine):
    """Its expressions are numbers: the roundings on the longest way from an input."""

    def expression(self, *operands: Hashable) -> int:
        numbers = [number for number in operands if isinstance(number, int)]
        return 1 + max(numbers) if min(numbers) >= 0 else 0


def roundings(plan: Plan, root: int = 0) -> int:
    """The most steps that combine on the way of an input to a result: each of them rounds once."""
    found = [0]
    for index in range(len(plan.channels)):
        machine = _Counting(plan, index, slot_depth(plan.size), root)
        machine.run()
        for outputs in machine.outputs:
            found += [value.expression for value in outputs.values() if isinstance(value.expression, int)]
    return max(found)
