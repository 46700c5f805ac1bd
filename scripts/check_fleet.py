#!/usr/bin/env python3
"""What a fleet on this machine keeps, loses and gains. One of:

    scripts/check_fleet.py routing       1,000 streams over four engines behind both routers: what
                                         they find cached, under cache-aware and random routing
    scripts/check_fleet.py deaths        kills a replica at ten random moments under load
    scripts/check_fleet.py throughput    two processes of one thread against one of two, in pairs
    scripts/check_fleet.py memory        what each further process of a model takes

The routers come from PyPI, into an environment of their own. The first two use a tiny model and
exit with 1 where an answer was wrong or lost; the others the embedded model, or --model.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.simulation.report import markdown_table
from tests.process.fleet.asking import MODEL, Question, ask_all, prefix, shared_prompts
from tests.process.fleet.deaths import answers_of, kill_while_it_answers, what_is_wrong
from tests.process.fleet.processes import engines, fleet, free_ports, pid_of
from tests.process.fleet.routing import ROUTERS, expected_hit_rate, run
from tests.process.server_process import ServerProcess, write_tiny_model

ENGINES = 4
REQUESTS, TIMES = 1000, 3
DEATHS = 10
FEW_ROWS = ("--max-running-requests", "2")  # so that most requests wait


def check_routing(args: argparse.Namespace) -> bool:
    """Whether every answer was whole and that of one process, and prefixes were found."""
    good = True
    rows = []
    with tiny_options() as options, engines(options, ENGINES) as replicas:
        urls = [replica.url() for replica in replicas]
        for times in (TIMES, 10):
            prompts = shared_prompts(-(-REQUESTS // times), times)[:REQUESTS]
            questions = [Question(prompt, max_tokens=8) for prompt in prompts]
            alone = ask_all(urls[0], questions)
            for command in ROUTERS:
                runs = {
                    policy: run(command, policy, urls, free_ports(2), questions)
                    for policy in ("random", "cache_aware")
                }
                for one in runs.values():
                    same = [
                        a.complete and a.text == b.text
                        for a, b in zip(one.answers, alone, strict=True)
                    ]
                    good &= all(same)
                chance, aware = (one.hit_rate for one in runs.values())
                good &= times != TIMES or aware > 2 * chance
                told = expected_hit_rate(ENGINES, times), chance, aware
                rows.append([command[0], str(times), *(f"{rate:.2f}" for rate in told)])
                print(*rows[-1], flush=True)
    head = ["router", "requests of a prefix", "random, as reckoned", "random", "cache-aware"]
    print(markdown_table(head, rows), "every answer was right" if good else "WRONG", sep="\n")
    return good


def check_deaths(args: argparse.Namespace) -> bool:
    """Whether a death cost the streams that had begun, in time, and nothing else."""
    port = free_ports(ENGINES + 2)
    url = f"http://127.0.0.1:{port}"
    draw = random.Random(args.seed)
    wrong: list[str] = []
    with tiny_options() as options, fleet([*options, *FEW_ROWS], port, ENGINES) as process:
        expected = answers_of(f"http://127.0.0.1:{port + 1}")
        for _ in range(DEATHS):
            pids = [pid_of(port + 1 + number) for number in range(ENGINES)]
            death = kill_while_it_answers(url, pids, draw)
            wrong += what_is_wrong(death.answers, expected, death.at_s)
            cut = sum(not answer.complete for _, answer in death.answers)
            print(
                f"replica {death.number}: of {len(death.answers)} requests {cut} were cut off, the"
                f" last after {1e3 * death.last_cut_s:.0f} ms",
                flush=True,
            )
            process.wait_for(f"replica {death.number} takes requests")
    print(*(wrong or ["every other one was answered in full"]), sep="\n")
    return not wrong


@dataclass(frozen=True, slots=True)
class Situation:
    """Args: shared_tokens: with which all prompts begin."""

    name: str
    requests: int
    at_once: int
    prompt_tokens: int
    max_tokens: int
    shared_tokens: int = 0

    def questions(self, seed: int) -> list[Question]:
        """In letters: each takes somewhat less than a token of a real vocabulary."""
        shared = prefix(seed, self.shared_tokens)
        return [
            Question(shared + prefix(1000 * seed + n, self.prompt_tokens), self.max_tokens)
            for n in range(1, self.requests + 1)
        ]


SITUATIONS = (
    Situation("one stream", 2, 1, 32, 64),
    Situation("4 streams", 8, 4, 32, 64),
    Situation("16 streams", 32, 16, 32, 32),
    Situation("64 at once", 64, 64, 64, 24),
    Situation("32 that share a prefix of 700 tokens", 32, 16, 16, 24, 1000),
    Situation("one prompt of 1,400 tokens", 1, 1, 2000, 2),
)


def check_throughput(args: argparse.Namespace) -> bool:
    """Seconds of the same requests: one process of two threads, two of one behind the router."""
    port = free_ports(5)
    words = [*args.options, "--served-model-name", MODEL, "--max-total-tokens", "32768"]
    rows = []
    with ExitStack() as stack:
        one = ServerProcess(*words, "--port", "0", "--cpu-threads", "2")
        alone = stack.enter_context(one).url()
        stack.enter_context(fleet(words, port, router=args.router))
        both = f"http://127.0.0.1:{port}"
        for at, situation in enumerate(SITUATIONS):
            pairs = []
            for pair in range(args.pairs):
                order = [alone, both] if pair % 2 else [both, alone]
                seed = 100 * at + pair
                took = {url: seconds_of(url, situation, seed) for url in order}
                pairs.append((took[alone], took[both]))
            ratio = median(single / double for single, double in pairs)
            seconds = [f"{median(times):.1f} s" for times in zip(*pairs, strict=True)]
            rows.append([situation.name, *seconds, f"{ratio:.2f}"])
            print(*rows[-1], flush=True)
    head = ["", "one process, 2 threads", "2 processes of one", "times as fast"]
    print(markdown_table(head, rows))
    return True


def seconds_of(url: str, situation: Situation, seed: int) -> float:
    begun = time.monotonic()
    answers = ask_all(url, situation.questions(seed), situation.at_once)
    assert all(answer.complete for answer in answers)
    return time.monotonic() - begun


def check_memory(args: argparse.Namespace) -> bool:
    """Proportional set sizes: memory that processes share counts once between them."""
    rows = []
    for replicas in (1, 2, 4):
        port = free_ports(replicas + 2)
        words = [*args.options, "--served-model-name", MODEL, "--max-total-tokens", "4096"]
        with fleet(words, port, replicas):
            pids = [pid_of(port + 1 + number) for number in range(replicas)]
            assert all(a.complete for a in ask_all(f"http://127.0.0.1:{port}", questions(8)))
            pss, anonymous = (
                sum(rollup(pid)[name] for pid in pids) for name in ("Pss", "Pss_Anon")
            )
        rows.append(
            [str(replicas), f"{pss:,.0f}", f"{pss / replicas:,.0f}", f"{anonymous / replicas:,.0f}"]
        )
        print(*rows[-1], flush=True)
    head = ["processes", "PSS of all, MiB", "of each", "of that its own, not of files"]
    print(markdown_table(head, rows))
    return True


def questions(count: int) -> list[Question]:
    return [Question(prefix(number, 50)) for number in range(count)]


def rollup(pid: int) -> dict[str, float]:
    """Sizes of a process's memory in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}


@contextmanager
def tiny_options() -> Iterator[Sequence[str]]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny-llama")
        words = ["--model", str(model), "--port", "0", "--cache-dir", f"{folder}/cache"]
        yield [*words, "--cpu-kernels", "torch", "--max-total-tokens", "131072"]


CHECKS = {
    "routing": check_routing,
    "deaths": check_deaths,
    "throughput": check_throughput,
    "memory": check_memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--model", help="a folder or file; else the embedded one")
    parser.add_argument("--pairs", type=int, default=5, help="of throughput")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of death")
    parser.add_argument("--router", nargs="*", default=[], help="options of the router, throughput")
    args = parser.parse_args()
    args.options = ["--model", args.model] if args.model else []
    return 0 if CHECKS[args.check](args) else 1


if __name__ == "__main__":
    sys.exit(main())
