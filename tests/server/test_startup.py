"""While the model loads the process says that it lives and is not ready; then the server answers."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from server.args import make_config
from server.http.sockets import base_url, listen
from server.launcher import tls_context
from server.startup import answering_probes


def ask(url):
    """Status and JSON of a GET over a connection of its own."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def test_the_process_lives_and_all_else_is_told_to_come_back():
    sockets = listen("127.0.0.1", 0)
    url = base_url(sockets, tls=False)
    with answering_probes(sockets, None):
        assert ask(url + "/live")[:2] == (200, {"status": "ok"})
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            status, body, headers = ask(url + path)
            assert (status, body["error"]["code"]) == (503, "loading")
            assert int(headers["Retry-After"]) >= 1
    for sock in sockets:
        sock.close()


def test_who_comes_after_it_waits_for_the_server_proper():
    sockets = listen("127.0.0.1", 0)
    url = base_url(sockets, tls=False)
    with answering_probes(sockets, None):
        ask(url + "/health")
    found = []
    waiting = threading.Thread(target=lambda: found.append(ask(url + "/health")[1]))
    waiting.start()
    (sock,) = sockets
    sock.setblocking(True)
    connection, _ = sock.accept()  # the backlog is still there, and nobody else takes from it
    with connection:
        connection.recv(4096)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"me":1}')
    waiting.join(30)
    assert found == [{"me": 1}]
    sock.close()


@pytest.mark.parametrize("end", [SystemExit, ValueError])
def test_loading_that_fails_leaves_no_thread(end):
    sockets = listen("127.0.0.1", 0)
    before = threading.active_count()
    with pytest.raises(end), answering_probes(sockets, None):
        raise end
    assert threading.active_count() == before
    for sock in sockets:
        sock.close()


def test_what_is_no_http_is_answered_in_json_without_a_traceback(caplog):
    (sock,) = listen("127.0.0.1", 0)
    with answering_probes([sock], None), socket.create_connection(sock.getsockname()) as client:
        client.settimeout(30)
        client.sendall(b"GARBAGE\r\n\r\n")
        with client.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    sock.close()
    assert b" 400 " in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_handshake_that_does_not_end_does_not_keep_the_server_from_its_start(certificate):
    cert, key = map(str, certificate)
    tls = tls_context(make_config({"ssl_certfile": cert, "ssl_keyfile": key}))
    sockets = listen("127.0.0.1", 0)
    before = threading.active_count()
    trust = ssl.create_default_context(cafile=cert)
    with answering_probes(sockets, tls), socket.create_connection(sockets[0].getsockname()):
        url = base_url(sockets, tls=True)
        with urllib.request.urlopen(url + "/live", timeout=30, context=trust) as answer:
            assert json.load(answer) == {"status": "ok"}
    assert threading.active_count() == before
    for sock in sockets:
        sock.close()
