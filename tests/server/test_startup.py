"""While the model loads the process says that it lives and is not ready; then the server answers."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import pytest

from server.http.sockets import base_url, listen
from server.startup import answering_probes


def ask(url):
    """Status and JSON of a GET over a connection of its own."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def test_health_lives_and_all_else_is_told_to_come_back():
    sockets = listen("127.0.0.1", 0)
    url = base_url(sockets, tls=False)
    with answering_probes(sockets, None):
        assert ask(url + "/health")[:2] == (200, {"status": "ok"})
        for path in ("/ready", "/v1/models", "/metrics"):
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
