"""Pictures by address, from servers on this machine that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import io
import ipaddress
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_http import Quiet, running
from PIL import Image

from diffgen.errors import InvalidRequest
from diffgen.http import remote
from diffgen.http.args import HttpLimits
from diffgen.http.pictures import given, read_picture
from diffgen.http.remote import Remote, is_public, read_places


class Site(http.server.ThreadingHTTPServer):
    """``seen`` holds the paths that were asked for, ``sent`` the headers of the last request."""

    daemon_threads = True

    def __init__(self, address: str = "127.0.0.1", port: int = 0, content: bytes = b"") -> None:
        super().__init__((address, port), _Answer)
        self.port, self.content = self.server_address[1], content
        self.url = f"http://{address}:{self.port}"
        self.seen: list[str] = []
        self.sent: dict[str, str] = {}


class _Answer(Quiet):
    server: Site

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        self.server.sent = {name.lower(): value for name, value in self.headers.items()}
        kind, _, rest = self.path[1:].partition("?")
        self.send_response({"to": 302, "loop": 307, "missing": 404}.get(kind, 200))
        if kind == "to":
            self.send_header("location", rest)
            self.send_header("set-cookie", "a=b")
        if kind == "loop":
            self.send_header("location", "/loop")
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asks has had enough
            if kind == "endless":
                while True:
                    self.wfile.write(bytes(10_000))
            if kind == "slow":
                for _ in range(100):
                    self.wfile.write(b"\x89")
                    time.sleep(0.1)
            self.wfile.write(b"<html>" if kind == "page" else self.server.content)


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def site() -> Iterator[Site]:
    with running(Site(content=png())) as site:
        yield site


def fetch(address: str, *places: str, total_s: float = 20.0, most: int = 100_000) -> bytes:
    return asyncio.run(Remote(read_places(places), total_s).fetch("image", address, most))


def refusal(address: str, *places: str, **options: Any) -> tuple[str, str]:
    """Code and message."""
    with pytest.raises(InvalidRequest) as caught:
        fetch(address, *places, **options)
    assert caught.value.param == "image"
    return caught.value.code, caught.value.message


def place(site: Site) -> str:
    return f"127.0.0.1:{site.port}"


def test_a_picture_is_fetched_and_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, limits = Remote(read_places([place(site)])), HttpLimits()
    (picture,) = given({"image_url": {"url": f"{site.url}/a.png"}}, limits, allowed)
    assert picture.is_remote
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/nope")
    pixels = asyncio.run(read_picture(picture, limits, allowed))
    assert np.array_equal(pixels, np.full((2, 3, 3), (10, 20, 30)))
    assert site.sent["host"] == f"127.0.0.1:{site.port}"
    assert not {"cookie", "authorization"} & site.sent.keys()


def test_off_unless_allowed_and_only_what_is(site: Site) -> None:
    assert "addresses are not fetched" in refusal(f"{site.url}/a.png")[1]
    with running(Site(content=png())) as other:
        for address, places in (
            (other.url, [place(site)]),
            (other.url, ["public"]),
            (f"http://localhost:{other.port}", ["public", "127.0.0.1"]),
            (f"http://localhost:{other.port}", [f"localhost:{other.port}"]),
            (f"http://0x7f000001:{other.port}", [f"public:{other.port}"]),
            (f"http://2130706433:{other.port}", [f"public:{other.port}"]),
            (f"http://[::ffff:127.0.0.1]:{other.port}", [f"public:{other.port}"]),
        ):
            code, message = refusal(address, *places)
            assert (code, "from that host and port" in message) == ("url_not_allowed", True), address
        assert other.seen == []
        assert fetch(f"http://localhost:{other.port}/", f"127.0.0.0/8:{other.port}", f"[::1]:{other.port}") == png()
    for address in (
        "file:///etc/passwd",
        "ftp://a/",
        "http:///x",
        "http://a\tb/",
        "http://\u2460.\u2460/",
        "gopher://a",
    ):
        assert refusal(address, "public")[0] == "url_not_allowed"
    code, message = refusal(f"http://me:secret@127.0.0.1:{site.port}/", place(site))
    assert code == "url_not_allowed"
    assert "secret" not in message
    assert refusal("http://nowhere.invalid/", "public") == (
        "url_not_allowed",
        refusal("http://127.0.0.1/", "public")[1].replace("http://127.0.0.1/", "http://nowhere.invalid/"),
    ), "whether there is such a name is not told"
    assert site.seen == []


def test_each_redirect_is_checked(site: Site) -> None:
    with running(Site(content=png())) as inner:
        code, message = refusal(f"{site.url}/to?{inner.url}/a.png", place(site))
        assert code == "url_not_allowed"
        assert inner.url in message
        assert refusal(f"{site.url}/to?file:///etc/passwd", place(site))[0] == "url_not_allowed"
        assert inner.seen == []
        assert fetch(f"{site.url}/to?{inner.url}/a.png", place(site), place(inner)) == png()
        assert "cookie" not in inner.sent
    assert fetch(f"{site.url}/to?/to?/to?/a.png", place(site)) == png()
    code, message = refusal(f"{site.url}/loop", place(site))
    assert (code, "more than 3 times" in message) == ("image_fetch_failed", True)
    assert site.seen.count("/loop") == 4


def test_too_much_too_slow_and_no_picture(site: Site) -> None:
    assert refusal(f"{site.url}/endless", place(site))[0] == "image_too_large"
    began = time.monotonic()
    code, message = refusal(f"{site.url}/slow", place(site), total_s=0.5)
    assert (code, "within 0.5 s" in message) == ("image_fetch_failed", True)
    assert time.monotonic() - began < 3
    assert "answers 404" in refusal(f"{site.url}/missing", place(site))[1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert refusal(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}", total_s=0.3)[0] == "image_fetch_failed"
    assert refusal(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}")[0] == "image_fetch_failed", "nobody listens"
    allowed = Remote(read_places([place(site)]))
    (picture,) = given({"url": f"{site.url}/page"}, HttpLimits(), allowed)
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(read_picture(picture, HttpLimits(), allowed))
    assert (caught.value.code, caught.value.param) == ("image_decode_failed", "url")


def test_a_name_is_looked_up_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stands for another host a moment later: the connection still goes to what was checked."""
    asked: list[str] = []
    look_up = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **options: Any) -> Any:
        if host in ("turns.example", b"turns.example"):
            asked.append("turns.example")
            host = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with running(Site("127.0.0.2", site.port)) as inner:
        assert fetch(f"http://turns.example:{site.port}/a.png", place(site)) == png()
        assert (len(asked), inner.seen) == (1, [])
        assert site.sent["host"] == f"turns.example:{site.port}"
        assert refusal(f"http://turns.example:{site.port}/", place(site))[0] == "url_not_allowed"
        assert inner.seen == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
def test_certificates_are_checked_by_name(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "key",
        "-out",
        "cert",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=pictures.example", "-addext", "subjectAltName=DNS:pictures.example"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    site.socket = context.wrap_socket(site.socket, server_side=True)
    look_up = socket.getaddrinfo
    names = {"pictures.example": "127.0.0.1", "other.example": "127.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: look_up(names.get(host, host), *a, **k))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    remote._tls.cache_clear()
    try:
        assert fetch(f"https://pictures.example:{site.port}/a.png", place(site)) == png()
        code, message = refusal(f"https://other.example:{site.port}/a.png", place(site))
        assert (code, "certificate" in message.lower()) == ("image_fetch_failed", True), message
    finally:
        remote._tls.cache_clear()


def test_what_is_public() -> None:
    public = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
    private = [
        *("127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1"),
        *("::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::808:808", "2002:a00:1::", "2001::1", "2001:db8::1"),
        *("fe80::1", "fec0::1", "fd00::1", "ff02::1", "100::1"),
    ]
    (anywhere,) = read_places(["public"])
    for text, expected in [*((each, True) for each in public), *((each, False) for each in private)]:
        ip = ipaddress.ip_address(text)
        assert remote._reaches(anywhere, ip) is expected, text
        assert is_public(getattr(ip, "ipv4_mapped", None) or ip) is expected, text


def test_places() -> None:
    found = read_places(
        ["public", "Images.example.org:8443", "10.1.0.0/16", "10.1.2.3:8080", "fd00::/8", "[fd00::/8]:81"]
    )
    assert [(each.host, str(each.network), each.port) for each in found] == [
        *((None, "None", None), ("images.example.org", "None", 8443), (None, "10.1.0.0/16", None)),
        *((None, "10.1.2.3/32", 8080), (None, "fd00::/8", None), (None, "fd00::/8", 81)),
    ]
    for wrong in ("*.example.org", "http://a", "10.1.0.1/16", "10.1.2", "a:0", "a:65536", "fd00::/200", "[::1", "a/b"):
        with pytest.raises(InvalidRequest, match="remote_pictures holds"):
            read_places([wrong])
