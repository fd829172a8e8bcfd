"""The default policy: which addresses are public."""

from ipaddress import ip_address

import pytest

from snugvl.server.media import fetch
from snugvl.server.media.fetch import is_foreign, is_public


def _words(text: str) -> list[str]:
    return text.split()


# First and last address of every special block, and their neighbours outside it.
INSIDE = _words("""
0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.0 127.255.255.255
168.63.129.16 169.254.0.0 169.254.169.254 169.254.255.255 172.16.0.0 172.31.255.255 192.0.0.0 192.0.0.255
192.0.2.0 192.0.2.255 192.31.196.1 192.52.193.1 192.88.99.0 192.88.99.255 192.168.0.0 192.168.255.255
192.175.48.1 198.18.0.0 198.19.255.255 198.51.100.0 198.51.100.255 203.0.113.0 203.0.113.255 224.0.0.0
239.255.255.255 240.0.0.0 255.255.255.255
:: ::1 ::7f00:1 ::ffff:0:0 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 64:ff9b:: 64:ff9b::7f00:1 64:ff9b::8.8.8.8
64:ff9b:1:: 64:ff9b:1:ffff:ffff:ffff:ffff:ffff 100:: 2001:: 2001:1:: 2001:2::1 2001:10::1 2001:20::1
2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff 2001:db8:: 2001:db8:ffff:ffff:ffff:ffff:ffff:ffff 2002::
2002:7f00:1:: 2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff 2620:4f:8000::1 3fff:: 3fff:fff::1 4000:: 5f00::1
fc00:: fd00:ec2::254 fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff fe80:: fe80::1%eth0 febf::1 fec0::1 feff::1
ff00:: ff02::1 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 1fff:ffff::1
""")
OUTSIDE = _words("""
1.0.0.0 8.8.8.8 9.255.255.255 11.0.0.0 93.184.216.34 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0
168.63.129.15 168.63.129.17 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0
192.0.3.0 192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255
198.51.101.0 203.0.112.255 203.0.114.0 223.255.255.255
2000::1 2001:200::1 2001:db7:ffff::1 2001:db9:: 2001:4860:4860::8888 2003::1 2606:2800:220:1::1
2620:4f:7fff::1 3ffe::1 3fff:1000::
""")


def test_special_addresses_are_not_public() -> None:
    assert [text for text in INSIDE if is_public(ip_address(text))] == []
    assert [text for text in INSIDE if is_foreign(ip_address(text))] == []


def test_ordinary_addresses_are_public() -> None:
    assert [text for text in OUTSIDE if not is_public(ip_address(text))] == []


def test_everything_the_library_calls_private_is_refused() -> None:
    for text in OUTSIDE:
        address = ip_address(text)
        assert not any((address.is_private, address.is_multicast, address.is_reserved))


def test_a_public_address_of_this_machine_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ip_address("93.184.216.34")
    assert is_foreign(mine)
    monkeypatch.setattr(fetch, "_own_addresses", lambda: {mine})
    assert is_public(mine)
    assert not is_foreign(mine)


def test_own_addresses_are_found() -> None:
    assert ip_address("127.0.0.1") in fetch._own_addresses()
