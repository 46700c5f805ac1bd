"""Listening: one port for all addresses of a name, a taken one told by name, TLS."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl

import pytest

from runtime.errors import ConfigError
from server.args import make_config
from server.http.sockets import allow_files, base_url, listen, listen_on_path
from server.launcher import tls_context
from tests.fakes import fake_server


def test_a_taken_port_is_named():
    (taken,) = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with taken, pytest.raises(ConfigError, match=f"127.0.0.1:{port}: address already in use"):
        listen("127.0.0.1", port)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard < 600:
        pytest.skip("the machine's own limit leaves no room for this")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        assert allow_files(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500, hard)
        assert allow_files(600) == 600
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, hard)
        assert allow_files(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unknown_host_is_named():
    with pytest.raises(ConfigError, match=r"host 'no\.such\.host\.invalid'"):
        listen("no.such.host.invalid", 0)


def test_all_addresses_of_a_name_share_the_port():
    sockets = listen("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:{}"),
        ("0.0.0.0", False, "http://127.0.0.1:{}"),
        ("127.0.0.1", True, "https://127.0.0.1:{}"),
    ],
)
def test_the_printed_address_can_be_used(host, tls, url):
    sockets = listen(host, 0)
    assert base_url(sockets, tls=tls) == url.format(sockets[0].getsockname()[1])
    for sock in sockets:
        sock.close()


def test_a_unix_socket_left_behind_is_taken_over_and_a_live_one_is_not(tmp_path):
    path = str(tmp_path / "s")
    (first,) = listen_on_path(path)
    with pytest.raises(ConfigError, match=f"cannot listen on {path}: address already in use"):
        listen_on_path(path)
    first.close()  # as a server that is killed leaves it
    (second,) = listen_on_path(path)
    assert base_url([second], tls=False) == "http://localhost"
    second.close()


@pytest.mark.parametrize("name", ["file", "folder", "none/s", "x" * 200])
def test_what_is_no_unix_socket_is_told_and_left_alone(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen_on_path(str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not socket.has_ipv6, reason="the machine has no IPv6")
def test_an_ipv6_address_is_bracketed():
    try:
        sockets = listen("::1", 0)
    except ConfigError as error:
        pytest.skip(str(error))
    assert base_url(sockets, tls=False) == f"http://[::1]:{sockets[0].getsockname()[1]}"
    sockets[0].close()


async def test_tls_serves_with_the_given_files(certificate):
    cert, key = certificate
    config = make_config({"ssl_certfile": str(cert), "ssl_keyfile": str(key)})
    async with asyncio.timeout(30), fake_server(tls=tls_context(config)) as server:
        trust = ssl.create_default_context(cafile=str(cert))
        assert server.url.startswith("https://")
        async with server.client.get(server.url + "/health", ssl=trust) as answer:
            assert answer.status == 200
        body = {"prompt": "x", "max_tokens": 3}
        async with server.client.post(
            server.url + "/v1/completions", json=body, ssl=trust
        ) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 3


def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    missing = str(tmp_path / "none.pem")
    config = make_config({"ssl_certfile": missing, "ssl_keyfile": missing})
    with pytest.raises(ConfigError, match=r"none\.pem"):
        tls_context(config)
