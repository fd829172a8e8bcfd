"""Which addresses belong to the public internet.

Our own table instead of `ipaddress.is_global`: what that means changed between Python versions, and it calls
some addresses global through which IPv4 ones can be reached (6to4, NAT64). IPv6 is an allow list: only
global unicast space, less the parts of it that are special.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import psutil

Address = IPv4Address | IPv6Address

_SPECIAL_V4 = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this network, unspecified
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host services: public space, answered by the machine's own host
        "169.254.0.0/16",  # link-local, where clouds keep their metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_GLOBAL_V6 = ip_network("2000::/3")  # not in it: mapped IPv4, NAT64, unique local, link-local, multicast, …
_SPECIAL_V6 = tuple(
    ip_network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "2620:4f:8000::/48",
        "3fff::/20",  # documentation
    )
)


def is_public(address: Address) -> bool:
    """Whether `address` is an ordinary one on the public internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _GLOBAL_V6 and not any(address in network for network in _SPECIAL_V6)


def is_foreign(address: Address) -> bool:
    """Whether `address` is public and none of this machine's own, where services listen unprotected."""
    return is_public(address) and address not in _own_addresses()


def _own_addresses() -> set[Address]:
    found: set[Address] = set()
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            try:
                found.add(ip_address(entry.address.partition("%")[0]))
            except ValueError:  # a hardware address
                continue
    return found
