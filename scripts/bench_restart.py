"""The first token of a conversation: cold, cached, and after the server was killed and restarted.

Serves the embedded model (or another) with a file for its KV, asks one long prompt twice, kills
the server with SIGKILL, starts it again on the same file, and asks a third time. The answers must
be the same, and nearly all of the third prompt must come from the file.

    python scripts/bench_restart.py [--tokens 2800] [-- options of `serve`]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
READY_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Args: ttft_s: until the first text. computed: prompt tokens that were not cached."""

    ttft_s: float
    text: str
    prompt_tokens: int
    computed: int


class Server:
    """A server on a free port. Args: options: of `serve`."""

    def __init__(self, options: list[str]) -> None:
        command = [sys.executable, "-m", "server", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        )
        self.url = self._address()

    def _address(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if " is ready on " in line:
                return line.partition(" is ready on ")[2].split()[0]
        raise SystemExit("the server did not start")

    def ask(self, prompt: str) -> Answer:
        body = {
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun, first, text = time.perf_counter(), 0.0, ""
        usage: dict[str, Any] = {}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=READY_S) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    first = first or time.perf_counter() - begun
                    text += choice["text"]
                usage = event.get("usage") or usage
        prompt_tokens = usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(first, text, prompt_tokens, prompt_tokens - cached)

    def written(self) -> int:
        """Tokens that are kept below the pool."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        (found,) = [line for line in lines if line.startswith("loomserve:kv_tier_tokens")]
        return int(float(found.split()[-1]))

    def end(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(timeout=60)


def long_prompt(tokens: int) -> str:
    """About so many tokens, none of whose beginnings anybody else has."""
    lines = (
        f"Entry {i}: the reading was {i * 7919 % 1009} at {i * 31 % 60} past."
        for i in range(tokens)
    )
    text = ""
    for line in lines:
        if len(text) > 2.3 * tokens:
            break
        text += line + "\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2800, help="of the prompt, about")
    parser.add_argument("options", nargs="*", help="options of `serve`, behind --")
    given = parser.parse_args()
    prompt = long_prompt(given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--kv-offload-path", f"{folder}/kv", *given.options]
        server = Server(options)
        server.ask("Hello")  # what the first request of a process costs is no matter here
        cold, cached = server.ask(prompt), server.ask(prompt)
        while server.written() < cold.prompt_tokens // 16 * 16:
            time.sleep(0.05)
        time.sleep(1.0)  # for the file; what is not there yet would be computed
        server.end(signal.SIGKILL)
        server = Server(options)
        server.ask("Hello")
        again = server.ask(prompt)
        server.end(signal.SIGTERM)
    same = cold.text == cached.text == again.text
    for name, answer in (("cold", cold), ("cached", cached), ("restarted", again)):
        print(
            f"{name:10} first token {answer.ttft_s * 1e3:8,.0f} ms,"
            f" {answer.computed:5} of {answer.prompt_tokens} prompt tokens computed"
        )
    share = again.ttft_s / cold.ttft_s
    print(f"after the restart: {share:.1%} of cold, the same tokens: {'yes' if same else 'NO'}")
    runs = {"cold": asdict(cold), "cached": asdict(cached), "restarted": asdict(again)}
    print(json.dumps({**runs, "share": share, "same": same}))
    return 0 if same and share <= 0.1 and again.computed < cold.prompt_tokens / 10 else 1


if __name__ == "__main__":
    sys.exit(main())
