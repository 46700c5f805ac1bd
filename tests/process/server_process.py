"""A server in a process of its own, as a user starts it, and the tiny model it serves."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from tests.values import present

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # far beyond what anything here takes: a hang must fail, not stall


def write_tiny_model(folder: Path) -> Path:
    """A byte-level Llama of 262 tokens and 4,096 positions, with its tokenizer, in milliseconds."""
    # Torch and transformers, which most who start a server do without.
    from gguf import GGMLQuantizationType

    from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
    from runtime.checkpoints.gguf_tokenizer import write_tokenizer
    from tests.runtime.checkpoints.tiny_models import make_llama, write_folder, write_gguf

    model = make_llama()
    model.config.max_position_embeddings = 4096
    write_folder(model, folder)
    file = write_gguf(model, folder.with_suffix(".gguf"), GGMLQuantizationType.F32)
    write_tokenizer(GgufCheckpoint(file), folder)
    return folder


class ServerProcess:
    """`python -m server OPTIONS`. Ended, if need be by force, when the `with` block ends."""

    def __init__(
        self,
        *options: str,
        env: dict[str, str] | None = None,
        command: list[str] | None = None,
    ) -> None:
        """command: another program, for what reads its output alike."""
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "server", *options],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._output = present(self._process.stdout)
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._output.close()

    def _read(self) -> None:
        for line in self._output:
            self.lines.append(line.rstrip("\n"))
            self._news.put(line)
        self._news.put(None)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> str:
        """The first new line of output that the pattern is found in."""
        while True:
            line = self._news.get(timeout=PATIENCE_S)
            assert line is not None, f"ended before {pattern!r} was printed:\n{self.output}"
            if re.search(pattern, line):
                return line

    def url(self) -> str:
        """The address of the ready line, once there is one."""
        return present(re.search(r"https?://\S+", self.wait_for(r"is ready on http"))).group()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def exit_status(self) -> int:
        return self._process.wait(timeout=PATIENCE_S)
