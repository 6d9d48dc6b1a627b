"""What the tests of several hosts have in common. They need root and iproute2, for network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from net.network import Network, unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.netns)
            item.add_marker(
                pytest.mark.skipif(unavailable() is not None, reason=f"no namespaces here: {unavailable()}")
            )


@pytest.fixture(scope="module")
def shared_network() -> Iterator[Network]:
    with Network(hosts=4) as made:
        yield made


@pytest.fixture
def network(shared_network: Network) -> Iterator[Network]:
    """Whole again for the next test, also if one fails while hosts are cut off."""
    yield shared_network
    shared_network.heal()
