"""The kernels of 64-bit Arm, cross-compiled and run under qemu: results, no speed.

A harness without Python computes what this machine writes down; each path of Arm is compared with
this machine's AVX2 path, to the bit where no order of sums is free: the sums of linear layers are
in one order on every path. Undefined behaviour ends the harness.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ops.coded_weight import CodedWeight
from ops.cpu import build
from ops.cpu.library import KINDS as NUMBERS
from ops.op_set import AttentionSpec, SamplingTensors
from ops.reference import ReferenceOps
from scripts._paged import paged_batch
from tests.missing import missing
from tests.ops.cpu.cases import generator, prefill_step, tiny_model
from tests.ops.cpu.conftest import open_ops
from tests.ops.cpu.test_native_coded_floats import KINDS as FLOAT_KINDS
from tests.ops.cpu.test_native_coded_floats import matrix_of
from tests.ops.cpu.test_native_codes import ALL_TYPES, coded

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps

pytestmark = pytest.mark.slow

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread")
# A trap needs no library of the sanitizer's.
CHECKS = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
# Processors that have what a path needs and, but for the first, no more.
PROCESSORS = {"neon_matrix": "max", "neon_dot": "neoverse-n1", "neon": "cortex-a53"}
KINDS = ("float32", "bfloat16", "float16", "int8", "int4")


@pytest.fixture(scope="module", params=PROCESSORS)
def path(request) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def harness(path, tmp_path_factory):
    """Runs commands on a path of Arm; returns the floats that come out."""
    lacking = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if lacking:
        missing(f"{' and '.join(lacking)} not found (Debian: g++-aarch64-linux-gnu, qemu-user)")
    folder = tmp_path_factory.mktemp(path)
    flags = (*FLAGS, *CHECKS, *build.machine_flags(path), f"-I{build.SOURCES}")
    sources = [*sorted(build.SOURCES.glob("*.cpp")), Path(__file__).with_name("harness.cpp")]
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, to: Path) -> None:
        subprocess.run([COMPILER, *flags, "-c", str(source), "-o", str(to)], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    program = folder / "harness"
    subprocess.run([COMPILER, *flags, *map(str, objects), "-o", str(program)], check=True)

    def run(*commands: bytes) -> np.ndarray:
        given, made = folder / "in", folder / "out"
        given.write_bytes(b"".join(commands) + numbers(0))
        command = [EMULATOR, "-L", ROOT, "-cpu", PROCESSORS[path], str(program)]
        done = subprocess.run(
            [*command, str(given), str(made)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return np.fromfile(made, np.float32)

    return run


@pytest.fixture(scope="module")
def avx2() -> NativeOps:
    if "avx2" not in build.available_paths():
        pytest.skip("this CPU has no AVX2, whose results are compared")
    return open_ops("avx2")


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def data(*tensors: Tensor) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def check_equal(got: np.ndarray, want: list[Tensor]) -> None:
    together = torch.cat([tensor.flatten().float() for tensor in want])
    torch.testing.assert_close(torch.from_numpy(got), together, rtol=0, atol=0, equal_nan=True)


def kinds_with_bits_of_avx2(path: str) -> list[str]:
    """All but bfloat16 where there are products of it: its inputs are rounded there."""
    return [kind for kind in KINDS if (path, kind) != ("neon_matrix", "bfloat16")]


def test_linear_layers_give_the_bits_of_avx2(path, harness, avx2):
    rand = generator()
    commands, want = [], []
    for kind in kinds_with_bits_of_avx2(path):
        for n, k, rows in ((1, 1, 1), (33, 37, 7), (50, 200, 13), (40, 387, 101)):
            weight, bias = torch.randn(n, k, generator=rand), torch.randn(n, generator=rand)
            x = torch.randn(rows, k, generator=rand)
            if rows == 13:
                x[3, 5], x[4] = float("nan"), 0.0
            commands.append(numbers(1, NUMBERS[kind], n, k, rows) + data(weight, x, bias))
            weight = weight if kind.startswith("int") else weight.to(getattr(torch, kind))
            packed = avx2.pack_linear(weight, bias, quantization=quantization_of(kind))
            want.append(avx2.linear(x, packed))
    check_equal(harness(*commands), want)


def test_weights_of_codes_give_the_bits_of_avx2(harness, avx2):
    commands, want = [], []
    matrices = [coded(kind, 37, 512) for kind in ALL_TYPES]
    for matrix, values in matrices + [matrix_of(kind, 37, 512) for kind in FLOAT_KINDS]:
        found = matrix.read(0, 37)
        halves, floats = (None, found.factors) if matrix.of_floats else (found.factors, None)
        table = None if matrix.table is None else matrix.table[None]
        arrays = (found.scales, found.minima, halves, found.minimum_factors, floats, table)
        given = [torch.empty(37, 0) if a is None else torch.from_numpy(a) for a in arrays]
        x = torch.randn(7, 512, generator=generator())
        x[3, 5], x[4] = float("nan"), 0.0
        widths = (tensor.shape[1] for tensor in given)
        head = numbers(7, NUMBERS[matrix.kind], 37, 512, 7, *widths)
        commands.append(head + data(torch.from_numpy(found.codes), *given, x))
        want += [values, avx2.linear(x, avx2.pack_linear(CodedWeight((matrix,))))]
    check_equal(harness(*commands), want)


def test_bfloat16_layers_equal_the_product_in_float64(harness):
    """Of rounded inputs, where the path rounds them; K is no multiple of what a product takes."""
    rand = generator(1)
    for n, k, rows in ((1, 1, 1), (33, 37, 7), (40, 387, 101), (50, 202, 6)):
        weight, x = torch.randn(n, k, generator=rand), torch.randn(rows, k, generator=rand)
        weight, x, bias = weight.bfloat16().float(), x.bfloat16().float(), torch.randn(n)
        commands = numbers(1, NUMBERS["bfloat16"], n, k, rows) + data(weight, x, bias)
        got = torch.from_numpy(harness(commands)).view(rows, n)
        want = x.double() @ weight.double().T + bias
        # Sums of 387 products of about 1 in float32.
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-4)


def quantization_of(kind: str) -> str | None:
    return kind if kind.startswith("int") else None


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_step_gives_the_logits_of_avx2(path, harness, avx2, kind):
    """The harness compares them with those of chunks, single tokens, other rows and threads."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    matrices = torch.float16 if kind == "float16" else None
    model = tiny_model(avx2, dtype, quantization=quantization_of(kind), matrix_dtype=matrices)
    decoder, step = avx2.compile(model), prefill_step(model, [(70, 70)], dtype)
    assert decoder is not None
    want = decoder(step)
    got = harness(model_command(kind, dtype, step.input_ids))
    if kind in kinds_with_bits_of_avx2(path):
        check_equal(got, [want])
    else:
        # Scores and weights in bfloat16 (8 bits) through two layers; the logits are around 1.
        error = float((torch.from_numpy(got).view_as(want) - want).abs().max())
        assert error <= 0.05 * float(want.abs().max())


def model_command(kind: str, dtype: torch.dtype, ids: Tensor) -> bytes:
    """`TINY`, whose layers are equal, with its weights and a prompt."""
    model: Any = tiny_model(ReferenceOps(), dtype)
    first, mlp = model.layers[0][0].mixer, model.layers[0][1].mixer
    sizes = [model.vocab_size, model.hidden_size, first.heads, first.kv_heads, first.head_dim]
    sizes += [mlp.intermediate_size, len(model.layers), len(first.rope), len(ids)]
    tensors = [model.embedding, first.rope]
    for attend, feed in model.layers:
        tensors += [attend.norm.weight, attend.mixer.qkv[0], attend.mixer.o[0]]
        tensors += [feed.norm.weight, feed.mixer.gate_up[0], feed.mixer.down[0]]
    tensors += [model.final_norm.weight, model.lm_head[0]]
    pool = 1 if dtype == torch.bfloat16 else 0
    head = numbers(6, NUMBERS[kind], pool, *sizes)
    return head + data(*(tensor.float() for tensor in tensors), ids)


def test_the_largest_integers_add_up_exactly(harness):
    rand = generator()
    commands, want = [], []
    for kind, low, high in (("int8", -127, 127), ("int4", 0, 15)):
        weight = torch.where(torch.rand(40, 96, generator=rand) < 0.5, low, high)
        weight[:, ::32], weight[:, 1::32] = low, high
        x = torch.where(torch.rand(9, 96, generator=rand) < 0.5, -127, 127)
        x[0], weight[0] = 127, high
        tensors = (weight.float(), x.float(), torch.zeros(40))
        commands.append(numbers(1, NUMBERS[kind], 40, 96, 9) + data(*tensors))
        want.append(x.long() @ weight.long().T)
    check_equal(harness(*commands), want)


def test_attention_equals_that_of_avx2(harness, avx2):
    commands, want = [], []
    cases: list[dict[str, Any]] = [{}, {"window": 7}, {"soft_cap": 3.0}]
    for dtype, number in ((torch.float32, 0), (torch.bfloat16, 1)):
        for case in cases:
            batch, _, _, slots = paged_batch([(5, 5), (150, 9), (80, 1)], 16)
            rand = generator(3)
            q = torch.randn(15, 4, 24, generator=rand)
            pools = [torch.randn(slots, 2, 24, generator=rand).to(dtype) for _ in range(2)]
            spec = AttentionSpec(0.2, case.get("window", 0), case.get("soft_cap", 0.0))
            table = batch.block_table[batch.rows.long()]
            rows = torch.arange(3, dtype=torch.int32)
            head = numbers(2, 15, 4, 2, 24, slots, number, 16, 3, table.shape[1], spec.window)
            settings = torch.tensor([spec.scale, spec.soft_cap])
            tensors = (settings, q, *pools, table, rows, batch.qo_indptr, batch.kv_lens)
            commands.append(head + data(*tensors))
            want.append(avx2.extend_attention(q, *pools, batch, spec))
    check_equal(harness(*commands), want)


def test_norms_and_activations_equal_those_of_avx2(harness, avx2):
    rand = generator(5)
    x, weight = torch.randn(5, 100, generator=rand), torch.randn(100, generator=rand)
    commands = [numbers(3, 5, 100) + data(x, weight)]
    want = [avx2.rms_norm(x, weight, 1e-5)]
    both = torch.randn(5, 2 * 70, generator=rand) * 4
    for number, run in enumerate(
        (
            avx2.silu_and_mul,
            lambda x: avx2.gelu_and_mul(x, tanh=True),
        )
    ):
        commands.append(numbers(4, 5, 70, number) + data(both))
        want.append(run(both))
    check_equal(harness(*commands), want)


def test_the_same_tokens_are_sampled(harness, avx2):
    rand, rows, vocab = generator(9), 6, 1000
    logits = torch.randn(rows, vocab, generator=rand) * 3
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 2.0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 0.1, 1.0])
    seed = torch.arange(rows)
    s = SamplingTensors(
        temperature=temperature,
        top_k=torch.zeros(rows, dtype=torch.int32),
        top_p=top_p,
        min_p=torch.zeros(rows),
        seed=seed,
        position=torch.full((rows,), 7),
        all_greedy=False,
        any_filter=True,
    )
    command = numbers(5, rows, vocab) + data(logits, temperature, top_p, seed)
    check_equal(harness(command), [avx2.sample(logits.clone(), s)])
