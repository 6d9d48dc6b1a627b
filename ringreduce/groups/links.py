"""What this process's groups have that the engine does not tell: links to other hosts, and users' plans.

Apart from `between_hosts`, which groups on one host never import.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Links

registered: dict[str, list[str]] = {}
"""The plans that users have registered, in words, the latest last, by the name that torch knows a group by."""

_living: weakref.WeakValueDictionary[str, Links] = weakref.WeakValueDictionary()


def remember(name: str, links: Links) -> None:
    """For `all_links`: these are the links of the group that torch knows by this name."""
    _living[name] = links


def all_links() -> dict[str, Links]:
    """Of the groups of this process that have ranks on other hosts, by name."""
    return {name: links for name, links in list(_living.items()) if links.group is not None}


def links_of(group: Any) -> Links | None:
    """None if all ranks of the group are on one host."""
    return next((links for links in all_links().values() if links.group is group), None)
