"""Pictures that a request names by address: fetched only from where the operator allows it.

Whoever may send requests would otherwise read, through this server, what only it can reach. So an address is checked
when it is read and again after its name has been resolved; the connection goes to the very IP address that was checked,
whatever the name stands for a moment later; and each redirect is checked like the first address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import httpx2

from diffgen.errors import InvalidRequest
from diffgen.fields import refuse

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC = "public"
#: For a whole picture, redirects and all.
TOTAL_S = 20.0
_REDIRECTS = 3
_AT_A_TIME = 8
_PORTS = {"http": 80, "https": 443}
# Of IPv6, what IANA has given out for use in the whole internet, without the parts that stand for other addresses.
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_TUNNELS = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_THERE = "this server fetches nothing from that host and port (see remote_pictures)"
# Resolvers wait long and cannot be cancelled; they must not take the threads of others.
_resolvers = ThreadPoolExecutor(4, "resolve")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where pictures may come from: a host by name, or every host in a network; any public one where both are None.
    Without a port it is 80 for http and 443 for https."""

    host: str | None = None
    network: _Network | None = None
    port: int | None = None


def read_places(names: Iterable[str]) -> tuple[Place, ...]:
    """``public``, host names, IP addresses and networks, each maybe with ``:PORT`` (IPv6 then in brackets). Raises
    :class:`InvalidRequest`."""
    return tuple(_place(name) for name in names)


def _place(text: str) -> Place:
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})", text)
    name, port = (found[1].strip("[]"), int(found[2])) if found else (text, None)
    if port is not None and not 1 <= port <= 65535:
        refuse("remote_pictures", f"remote_pictures holds {text!r:.100}; a port is from 1 to 65535")
    if name == PUBLIC:
        return Place(port=port)
    try:
        return Place(network=ipaddress.ip_network(name), port=port)
    except ValueError as error:
        # A name never ends in a number; what looks like an address must be one.
        if re.fullmatch(r"[a-zA-Z0-9._-]*[a-zA-Z][a-zA-Z0-9-]*", name) is None:
            rule = f"it takes {PUBLIC}, host names and networks such as 10.1.0.0/16, separated by commas"
            refuse("remote_pictures", f"remote_pictures holds {text!r:.100} ({error}); {rule}")
        return Place(host=name.lower(), port=port)


class Remote:
    """Fetches pictures from ``places``. Proxies and credentials of the environment do not count."""

    def __init__(self, places: Iterable[Place], total_s: float = TOTAL_S) -> None:
        self._places, self._total_s = tuple(places), total_s
        self._few = asyncio.Semaphore(_AT_A_TIME)

    def check(self, name: str, address: str) -> httpx2.URL:
        """An address that may be fetched, as far as its text tells; ``name`` is the parameter that it came in.

        Raises :class:`InvalidRequest`, ``url_not_allowed``.
        """
        if not self._places:
            raise _not_allowed(name, address, "addresses are not fetched")
        try:
            url = httpx2.URL(address)
        except (httpx2.InvalidURL, ValueError) as error:
            raise _not_allowed(name, address, f"it is no address: {error}") from None
        if url.scheme not in _PORTS or not url.host:
            raise _not_allowed(name, address, "only http and https addresses are fetched")
        if url.userinfo:
            raise _not_allowed(name, f"{url.scheme}://...@{url.host}", "user names and passwords are not sent")
        allowed = self._allowed(url)
        try:
            literal = ipaddress.ip_address(url.host)
        except ValueError:
            literal = None
        if not allowed or (literal is not None and not any(_reaches(place, literal) for place in allowed)):
            raise _not_allowed(name, address, _NOT_THERE)
        return url

    def _allowed(self, url: httpx2.URL) -> list[Place]:
        """The places that an address may belong to, whatever IP addresses its host has."""
        fits = [place for place in self._places if place.host in (None, url.host)]
        return [place for place in fits if _port(url) == (place.port or _PORTS[url.scheme])]

    async def fetch(self, name: str, address: str, most: int) -> bytes:
        """The content of an address, of at most ``most`` bytes.

        Raises :class:`InvalidRequest`: ``url_not_allowed``, ``image_too_large`` or ``image_fetch_failed``.
        """
        try:
            async with asyncio.timeout(self._total_s), self._few:
                return await self._follow(name, address, most)
        except TimeoutError:
            raise _failed(name, address, f"it is not there within {self._total_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _failed(name, address, str(error) or type(error).__name__) from None

    async def _follow(self, name: str, address: str, most: int) -> bytes:
        url = self.check(name, address)
        for _ in range(1 + _REDIRECTS):
            ip = await self._resolve(name, url)
            headers = {"host": url.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
            pinned, tls_name = url.copy_with(host=str(ip)), {"sni_hostname": url.raw_host.decode("ascii")}
            # A client a hop: nothing that one host sets, such as a cookie, goes to the next.
            async with (
                httpx2.AsyncClient(verify=_tls(), trust_env=False, timeout=self._total_s) as client,
                client.stream("GET", pinned, headers=headers, extensions=tls_name) as answer,
            ):
                if not answer.has_redirect_location:
                    return await _content(name, address, answer, most)
                url = self.check(name, str(url.join(answer.headers["location"])))
        raise _failed(name, address, f"it redirects more than {_REDIRECTS} times")

    async def _resolve(self, name: str, url: httpx2.URL) -> _Address:
        """The IP address to connect to. Each that the host has must be allowed, whichever is taken."""
        look_up = functools.partial(socket.getaddrinfo, url.raw_host.decode("ascii"), None, type=socket.SOCK_STREAM)
        try:
            entries = await asyncio.get_running_loop().run_in_executor(_resolvers, look_up)
            found = [ipaddress.ip_address(entry[4][0]) for entry in entries]
        except (OSError, ValueError):
            found = []
        allowed = self._allowed(url)
        if not found or not all(any(_reaches(place, ip) for place in allowed) for ip in found):
            # The same words whether there is such a host or not: names of an inner network are nobody's business.
            raise _not_allowed(name, str(url), _NOT_THERE)
        return found[0]


def _port(url: httpx2.URL) -> int:
    return url.port or _PORTS[url.scheme]


def _reaches(place: Place, ip: _Address) -> bool:
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return is_public(ip) if place.network is None else ip in place.network


def is_public(ip: _Address) -> bool:
    """Whether an address is one of the internet's, not of a machine or network of somebody's own, nor of many hosts."""
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return is_public(ipaddress.IPv4Address(ip.packed[-4:]))
        if ip not in _GLOBAL_V6 or any(ip in tunnel for tunnel in _TUNNELS):
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


async def _content(name: str, address: str, answer: httpx2.Response, most: int) -> bytes:
    if answer.status_code != 200:
        raise _failed(name, address, f"its server answers {answer.status_code}")
    found = bytearray()
    # As it comes, not unpacked: what is said of its length, or is in it, does not count.
    async for part in answer.aiter_raw():
        found += part
        if len(found) > most:
            rule = f"it has more than {most} bytes (limit body); use a smaller one"
            raise InvalidRequest(f"{name} {address[:60]!r}: {rule}", code="image_too_large", param=name)
    return bytes(found)


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


def _not_allowed(name: str, address: str, rule: str) -> InvalidRequest:
    remedy = "send the picture itself, as a file or as data:image/png;base64,..."
    return InvalidRequest(f"{name} {address[:60]!r}: {rule}; {remedy}", code="url_not_allowed", param=name)


def _failed(name: str, address: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {address[:60]!r}: {reason}", code="image_fetch_failed", param=name)
