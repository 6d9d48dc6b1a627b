"""Which interfaces a group uses: NCCL's grammar, CIDRs, what is left out by default; and what the kernel says."""

import socket
from ipaddress import IPv4Interface, IPv6Interface, ip_interface

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.errors import InvalidArgument
from ringreduce.network.interfaces import Filter, Interface, local_interfaces
from ringreduce.network.paths import paths_to
from ringreduce.network.sockets import Address


def interface(name: str, *addresses: str, up: bool = True) -> Interface:
    return Interface(name, 1, tuple(map(ip_interface, addresses)), up, loopback=name == "lo")


LO = interface("lo", "127.0.0.1/8", "::1/128")
HOST = [
    LO,
    interface("eth0", "10.0.0.1/24", "fd00::1/64", "fe80::1/64"),
    interface("eth1", "10.1.0.1/16", "2001:db8::1/64"),
    interface("eth10", "10.2.0.1/16"),
    interface("eth2", "10.3.0.1/16", up=False),
    interface("ib0", "192.168.0.1/24"),
    interface("docker0", "172.17.0.1/16"),
    interface("virbr0", "192.168.122.1/24"),
    interface("br-0123456789ab", "172.18.0.1/16"),
    interface("veth1", "fe80::2/64"),
    interface("tun0"),
]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "eth0 eth1 eth10 ib0"),
        ("eth", "eth0 eth1 eth10"),
        ("eth1", "eth1 eth10"),
        ("=eth1", "eth1"),
        ("=eth1,eth0", "eth1 eth0"),
        ("=eth", None),
        ("ib,eth0", "ib0 eth0"),
        (" ib , eth0 ", "ib0 eth0"),
        ("ib,eth,ib0", "ib0 eth0 eth1 eth10"),
        ("eth,^eth10", "eth0 eth1"),
        ("eth,^=eth1", "eth0 eth10"),
        ("^eth,ib", "veth1"),
        ("^eth,ib,veth", "lo"),
        ("^eth,ib,veth,lo", None),
        ("^eth1", "eth0 ib0"),
        ("^=eth1", "eth0 eth10 ib0"),
        ("^docker,lo", "eth0 eth1 eth10 ib0"),
        ("^eth,=ib", "ib0"),
        ("lo", "lo"),
        ("docker", "docker0"),
        ("veth", "veth1"),
        ("eth2", None),
        ("tun0", None),
        ("wlan", None),
        ("10.0.0.0/8", "eth0 eth1 eth10"),
        ("10.2.0.0/15,192.168.0.0/24", "eth10 ib0"),
        ("10.1.0.1", "eth1"),
        ("10.1.7.7/16", "eth1"),
        ("fd00::/8", "eth0"),
        ("^10.0.0.0/8,fd00::/8,2001:db8::/32", "ib0"),
        ("11.0.0.0/8", None),
    ],
)
def test_filters(text: str, names: str | None) -> None:
    if names is None:
        with pytest.raises(InvalidArgument) as raised:
            Filter.parse(text).choose(HOST)
        said = str(raised.value)
        assert f"RINGREDUCE_SOCKET_IFNAME={text!r}" in said
        for there in ("eth0 (10.0.0.1/24, fd00::1/64, fe80::1/64)", "eth2 (10.3.0.1/16, down)", "tun0 (no address)"):
            assert there in said
        return
    assert [chosen.name for chosen in Filter.parse(text).choose(HOST)] == names.split()


@pytest.mark.parametrize(
    ("text", "names", "addresses"),
    [
        ("eth0", "eth0", "10.0.0.1/24 fd00::1/64"),
        ("10.0.0.0/24", "eth0", "10.0.0.1/24"),
        ("fe80::/10,=eth0", "eth0 veth1", "10.0.0.1/24 fd00::1/64 fe80::2/64"),
        ("^10.0.0.0/8", "eth0 eth1 ib0", "fd00::1/64 2001:db8::1/64 192.168.0.1/24"),
        ("lo", "lo", "127.0.0.1/8 ::1/128"),
    ],
)
def test_addresses_of_filters(text: str, names: str, addresses: str) -> None:
    chosen = Filter.parse(text).choose(HOST)
    assert [one.name for one in chosen] == names.split()
    assert [str(address) for one in chosen for address in one.addresses] == addresses.split()


def test_what_is_taken_when_nothing_better_is_there() -> None:
    assert [one.name for one in Filter.parse("").choose([LO, interface("docker0", "172.17.0.1/16")])] == ["lo"]
    assert [one.name for one in Filter.parse("").choose([LO, interface("veth1", "fe80::2/64")])] == ["veth1"]
    routed = interface("lo", "127.0.0.1/8", "10.9.0.1/32", "::1/128", "fd00::9/128")  # by BGP to the host
    for text, there in [("", []), ("", [interface("veth1", "fe80::2/64")]), ("=lo", HOST[1:]), ("", HOST[-5:])]:
        (one,) = Filter.parse(text).choose([routed, *there])
        assert (one.name, *map(str, one.addresses)) == ("lo", "10.9.0.1/32", "fd00::9/128")
    assert "lo" not in [one.name for one in Filter.parse("").choose([routed, HOST[1]])]
    with pytest.raises(InvalidArgument, match=r"no interface can be used; there are eth2 .*down"):
        Filter.parse("").choose([interface("eth2", "10.0.0.1/8", up=False)])
    with pytest.raises(InvalidArgument, match="there are none"):
        Filter.parse("eth").choose([])


def test_a_source_is_of_a_scope_that_reaches_the_target() -> None:
    cable, routed = interface("lan0", "fe80::1/64"), interface("dummy0", "10.9.0.1/32")
    paths = paths_to([Address("lo", "10.9.0.2/32", 4711)], [LO, cable, routed], named=True)
    assert [(path.rail, path.source) for path in paths] == [(("dummy0", "lo"), ("10.9.0.1", 0))]


@pytest.mark.parametrize("text", ["eth,,ib", "^", "=", ",", "eth,^="])
def test_empty_entries(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"empty entry; write .*'eth,ib', '=eth0'"):
        Filter.parse(text)


def test_a_wrong_network() -> None:
    with pytest.raises(InvalidArgument, match=r"10\.1\.0\.0/33.* written as '10\.1\.0\.0/16'"):
        Filter.parse("10.1.0.0/33")


NAMES = st.lists(st.text("ab01", min_size=1, max_size=3), min_size=1, max_size=5, unique=True)


@given(NAMES, NAMES, st.booleans(), st.booleans())
def test_names_fit_as_nccl_says(there: list[str], wanted: list[str], out: bool, exact: bool) -> None:
    text = "^" * out + "=" * exact + ",".join(wanted)
    fits = {name: any(name == w if exact else name.startswith(w) for w in wanted) != out for name in there}
    expected = {name for name in there if fits[name]}
    interfaces = [interface(name, f"10.0.{n}.1/24") for n, name in enumerate(there)]
    if expected:
        assert {one.name for one in Filter.parse(text).choose(interfaces)} == expected
    else:
        with pytest.raises(InvalidArgument):
            Filter.parse(text).choose(interfaces)


def test_this_machine() -> None:
    there = {one.name: one for one in local_interfaces()}
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    assert set(there) == set(addresses) | {name for _, name in socket.if_nameindex()}
    for name, one in there.items():
        assert one.index == socket.if_nametoindex(name)
        assert one.loopback == ("loopback" in states[name].flags)
        assert one.up == ("up" in states[name].flags and "running" in states[name].flags)
        known = {a.address.partition("%")[0]: a for a in addresses[name]}
        for address in one.addresses:
            assert str(address.ip) in known
            if isinstance(address, IPv4Interface):
                assert str(address.netmask) == known[str(address.ip)].netmask
        families = {a.family for a in addresses[name]}
        assert (socket.AF_INET in families) == any(isinstance(a, IPv4Interface) for a in one.addresses)
        assert any(isinstance(a, IPv6Interface) for a in one.addresses) <= (socket.AF_INET6 in families)
