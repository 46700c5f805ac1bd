"""Ahead-of-time compilation of the GPU kernels, as they are launched, on a machine without a GPU.

The ops are called on CPU tensors with the launch replaced by a recorder, so what is compiled is
what the op would launch: types, constants, divisibility, warps and stages. Run as a script it
compiles the launches of the cases named, or of one part of all of them, for their targets, and
prints one JSON line per kernel and target:

    python tests/ops/gpu/aot.py extend_d128_g4 decode_d128_g4
    python tests/ops/gpu/aot.py 0/2

or, before the cases, `every` of the targets instead of the case's own. Another Triton is named by
its folder, as `pip install --target FOLDER --no-deps triton==3.7.1` makes it:

    PYTHONPATH=FOLDER python tests/ops/gpu/aot.py every 0/1

or what the launches of steps of several sizes and alignments are specialized on, and whether their
float32 products may be rounded, without compiling any of them to the end:

    python tests/ops/gpu/aot.py sources
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from unittest.mock import Mock, patch

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from ops.gpu import (
    activation,
    coded_linear,
    decode_attention,
    experts,
    extend_attention,
    place_heads,
    recurrent,
    rms_norm,
    rotary,
    sampling,
    store_kv,
)
from ops.gpu.library import Chip
from ops.gpu.op_set import GpuOps
from ops.op_set import (
    AttentionBatch,
    AttentionSpec,
    Expert,
    GroupedWeight,
    HeadNorm,
    KvScales,
    Penalties,
    RecurrentBatch,
    SamplingTensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_86": GPUTarget("cuda", 86, 32),  # RTX 30, A10, A40
    "sm_89": GPUTarget("cuda", 89, 32),  # RTX 40, L4, L40S
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "sm_100": GPUTarget("cuda", 100, 32),  # B200
    "sm_120": GPUTarget("cuda", 120, 32),  # RTX 50
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
# Each case is compiled for Hopper and for one of either kind, in turn: chips of one kind get the
# same tiles, and a compilation takes seconds.
DATACENTRE, CONSUMER = ("sm_80", "sm_100", "gfx942"), ("sm_86", "sm_89", "sm_120")
CHIPS = {
    "sm_80": Chip(large_shared=True),
    "sm_90": Chip(large_shared=True, warpgroups=True),
    "sm_100": Chip(large_shared=True, warpgroups=True),
    "gfx942": Chip(amd=True),
}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


_PRODUCTS = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)([.:\w]*)")
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_JUMP = re.compile(r"BRA[^`]*`\((\.L_\w+)\)")
_SPILL = re.compile(r"\b(?:LDL|STL)\b")
_COPIES = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x([0-9a-f]+)")


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs on one target; spills are bytes of stack (NVIDIA) or registers (AMD),
    loop_spills the instructions that move them in innermost loops (NVIDIA), copy_bytes the widths
    of its asynchronous copies to shared memory (NVIDIA), products its tensor cores' instructions
    without the number of columns (NVIDIA)."""

    kernel: str
    target: str
    registers: int
    shared_bytes: int
    spills: int
    loop_spills: int
    wgmma: bool
    approximate_log: bool
    copy_bytes: list[int]
    products: list[str]
    tf32: bool


@dataclass(frozen=True)
class Launch:
    function: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


def record_launches(call: Callable[[], Any]) -> list[Launch]:
    """The kernels that `call` would launch, none of which runs."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names: list[str] = [name for name in ("num_warps", "num_stages") if name in kwargs]
        options = {name: kwargs.pop(name) for name in names}
        launches.append(
            Launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options)
        )

    original = JITFunction.run
    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def source_of(launch: Launch) -> ASTSource:
    """The launch as a source for the compiler, specialized as the launcher would."""
    signature, constants, attributes = {}, {}, {}
    params = launch.function.params
    constexprs = {p.name for p in params if p.is_constexpr}
    for index, name in enumerate(launch.function.arg_names):
        value = launch.arguments[name]
        if (
            name in constexprs
            or value is None
            or (type(value) is int and value == 1 and not params[index].do_not_specialize)
        ):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], aligned = POINTERS[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name], aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        fixed = params[index].do_not_specialize or params[index].do_not_specialize_on_alignment
        if aligned and not fixed:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.function, signature, constants, attributes)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _loop_spills(cubin: str) -> int:
    """Loads and stores of spilled registers in a kernel's innermost loops."""
    code = subprocess.run(
        [_TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    # Behind the last exit stand waits for a barrier, whose jumps back are no loops of the kernel.
    lines = code[: code.rindex("EXIT")].splitlines()
    labels = {line.strip(" :"): at for at, line in enumerate(lines) if line.startswith(".L_")}
    jumps = [(at, _JUMP.search(line)) for at, line in enumerate(lines)]
    loops = [(labels.get(to[1], at), at) for at, to in jumps if to]
    loops = [(first, last) for first, last in loops if first < last]
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] for b in loops if b != a)]
    moves = [at for at, line in enumerate(lines) if _SPILL.search(line)]
    return sum(any(first <= at <= last for first, last in inner) for at in moves)


def _resources(compiled: Any, target: str) -> tuple[int, int, int]:
    """(registers, spills, loop_spills) of a compiled kernel."""
    if target.startswith("gfx"):
        assembly = compiled.asm["amdgcn"]
        spills = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
        spills += _number(r"\.sgpr_spill_count:\s*(\d+)", assembly)
        return _number(r"\.vgpr_count:\s*(\d+)", assembly), spills, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [_TOOLS / "cuobjdump", "--dump-resource-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        spills = _number(r"STACK:(\d+)", usage)
        in_loops = _loop_spills(cubin.name) if spills else 0
    return _number(r"REG:(\d+)", usage), spills, in_loops


def compile_launch(launch: Launch, target: str) -> Compiled:
    compiled = triton.compile(
        source_of(launch), target=TARGETS[target], options=dict(launch.options)
    )
    registers, spills, loop_spills = _resources(compiled, target)
    ptx = compiled.asm.get("ptx", "")
    return Compiled(
        kernel=launch.function.__name__,
        target=target,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spills=spills,
        loop_spills=loop_spills,
        wgmma="wgmma" in ptx,
        approximate_log="lg2.approx" in ptx,
        copy_bytes=sorted({int(width, 16) for width in _COPIES.findall(ptx)}),
        products=sorted(
            {name + re.sub(r"n\d+k", "k", form) for name, form in _PRODUCTS.findall(ptx)}
        ),
        tf32="tf32" in ptx,
    )


def rounds_products(launch: Launch, target: str = "sm_90") -> bool:
    """Whether a product of float32 may be rounded to tf32, by the first of the compiler's forms."""
    context = ir.context()
    ir.load_dialects(context)
    backend = make_backend(TARGETS[target])
    backend.load_dialects(context)
    options = backend.parse_options(dict(launch.options))
    codegen = backend.get_codegen_implementation(options)
    module = source_of(launch).make_ir(
        TARGETS[target], options, codegen, backend.get_module_map(), context
    )
    return "tf32" in str(module)


def _attention(
    op: Callable[..., Any], head_dim: int, group: int, *, tokens: int, dtype: torch.dtype,
    page_size: int = 16, window: int = 0, soft_cap: float = 0.0, sinks: bool = False,
    kv_codes: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Calls an attention op on tensors of a model with two KV heads and one batch row."""
    heads, slots = 2 * group, 64 * page_size
    pools = [torch.empty(slots, 2, head_dim, dtype=kv_codes or dtype) for _ in range(2)]
    scales = KvScales(torch.empty(slots, 2), torch.empty(slots, 2)) if kv_codes else None
    batch = AttentionBatch(
        block_table=torch.zeros(16, 64, dtype=torch.int32),
        rows=torch.zeros(1, dtype=torch.int32),
        qo_indptr=torch.tensor([0, tokens], dtype=torch.int32),
        kv_lens=torch.full((1,), tokens, dtype=torch.int32),
        page_size=page_size,
        max_q_len=tokens,
        max_kv_len=4096,
    )
    spec = AttentionSpec(0.125, window, soft_cap, torch.zeros(heads) if sinks else None)
    op(torch.empty(tokens, heads, head_dim, dtype=dtype), *pools, batch, spec, scales)


def _sampling(
    *, greedy: bool, filtered: bool, extras: bool, dtype: torch.dtype = torch.float32
) -> None:
    vocab, rows = 151_936, 4
    ids = torch.zeros(2, dtype=torch.int64)
    scalars = torch.ones(rows)
    s = SamplingTensors(
        scalars, scalars.int(), scalars, scalars, scalars.long(), scalars.long(), greedy, filtered
    )
    if extras:
        state = torch.zeros(rows, dtype=torch.int32)
        s.bias, s.banned = (ids, ids, torch.zeros(2)), (ids, ids)
        s.mask_rows, s.mask_bits = ids, torch.zeros(2, (vocab + 31) // 32, dtype=torch.int32)
        s.penalties = Penalties(
            state, scalars, scalars, scalars,
            torch.zeros(8, vocab, dtype=torch.bool), torch.zeros(8, vocab, dtype=torch.int32),
        )  # fmt: skip
    sampling.sample(torch.empty(rows, vocab, dtype=dtype), s)


def _elementwise(dtype: torch.dtype) -> None:
    """Every op beside attention and sampling, at the shapes of an 8B Llama."""
    x = torch.empty(4, 4096, dtype=dtype)
    qkv = torch.empty(4, 48, 128, dtype=dtype)
    weight = torch.empty(4096, dtype=dtype)
    pool = torch.empty(64, 8, 128, dtype=dtype)
    rms_norm.rms_norm(x, weight, 1e-5)
    rms_norm.add_rms_norm(x, x.clone(), weight, 1e-5)
    rms_norm.rms_norm(qkv[:, :32], weight[:128], 1e-5)
    for interleaved in (False, True):
        rotary.rotary(
            qkv[:, :32], qkv[:, 32:40], torch.zeros(4, dtype=torch.int64), torch.empty(8, 128),
            interleaved=interleaved,
        )  # fmt: skip
    slots = torch.zeros(4, dtype=torch.int64)
    store_kv.store_kv(qkv[:, 32:40], qkv[:, 40:], pool, pool, slots)
    scales = KvScales(torch.empty(64, 8), torch.empty(64, 8))
    for codes in (torch.int8, torch.float8_e4m3fn):
        coded = torch.empty(64, 8, 128, dtype=codes)
        store_kv.store_kv(qkv[:, 32:40], qkv[:, 40:], coded, coded, slots, scales)
        place_heads.place_heads(
            qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], coded, coded, slots, slots,
            q_norm=None, k_norm=None, rope=torch.empty(8, 128), interleaved=False, scales=scales,
        )  # fmt: skip
    rope = torch.empty(8, 128)
    for norm in (None, HeadNorm(weight[:128], 1e-6)):
        place_heads.place_heads(
            qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], pool, pool, slots, slots,
            q_norm=norm, k_norm=norm, rope=rope, interleaved=False,
        )  # fmt: skip
    activation.silu_and_mul(x)
    activation.gelu_and_mul(x, tanh=True)
    activation.gelu_and_mul(x, tanh=False)


def _grouped(n: int, k: int, kind: str, group: int, *, zeros: bool) -> GroupedWeight:
    scales = torch.empty(n, k // group)
    return GroupedWeight(
        kind,
        torch.empty(n, k, dtype=torch.uint8),
        scales,
        torch.empty_like(scales, dtype=torch.uint8) if zeros else None,
        torch.empty(16) if kind == "nf4" else None,
    )


def _coded(
    kind: str, *, tokens: int, dtype: torch.dtype = torch.bfloat16, group: int = 128,
    zeros: bool = False,
) -> None:  # fmt: skip
    """A Llama-3.1-8B's output of attention."""
    ops, size = GpuOps(), 4096
    packed = ops.pack_linear(_grouped(size, size, kind, group, zeros=zeros))
    ops.linear(torch.empty(tokens, size, dtype=dtype), packed)


def _experts(
    dtype: torch.dtype, *, tokens: int = 9, biases: bool = False, kind: str = "", group: int = 128
) -> None:
    """The shape of a Qwen3-30B-A3B's, but for the number of experts."""
    count, hidden, inner, top_k = 8, 2048, 768, 8
    matrices, vectors = [(2 * inner, hidden), (hidden, inner)], [(2 * inner,), (hidden,)]
    shapes = [*matrices, *(vectors if biases else [])]
    each: list[Any] = [torch.empty(count, *shape, dtype=dtype) for shape in shapes]
    if kind:
        coded = partial(_grouped, kind=kind, group=group, zeros=kind.startswith("int"))
        each = [[coded(n, k)] * count for n, k in matrices] + each[2:]
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    x, weights = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens, top_k)
    packed = GpuOps().pack_experts(Expert(*parts) for parts in zip(*each, strict=True))
    experts.run_experts(x, ids, weights, packed, "silu", GpuOps())


def _recurrent(x: torch.Tensor, rows: RecurrentBatch) -> None:
    """The shape of a Qwen3-Next-80B-A3B's."""
    tokens = len(x)
    recurrent.causal_conv(x, torch.empty(4, 8192), torch.empty(3, 3, 8192), rows)
    q, k, v = torch.empty(tokens, 8192).split((2048, 2048, 4096), dim=1)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in (q, k, v))
    factors, matrices = torch.empty(tokens, 32), torch.empty(3, 32, 128, 128)
    recurrent.gated_delta(q, k, v, factors, factors, matrices, rows)


def _recurrent_rows(longs: Callable[[int], torch.Tensor], rows: int) -> RecurrentBatch:
    return RecurrentBatch(
        longs(rows), longs(rows + 1), longs(rows + 1), longs(2 * rows), longs(2 * rows)
    )


_EXTEND = extend_attention.extend_attention
_DECODE = decode_attention.decode_attention
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_INT8, _FP8 = torch.int8, torch.float8_e4m3fn

# Pairwise over head dimension, group, feature, type and tile; each is a shape that is launched.
CASES: dict[str, Callable[[], None]] = {
    "extend_d64_g3": lambda: _attention(_EXTEND, 64, 3, tokens=300, dtype=_BF16, page_size=1),
    "extend_d80_sinks": lambda: _attention(_EXTEND, 80, 1, tokens=300, dtype=_FP16, sinks=True),
    "extend_d96_cap": lambda: _attention(_EXTEND, 96, 8, tokens=300, dtype=_BF16, soft_cap=30.0),
    "extend_d128_g4": lambda: _attention(_EXTEND, 128, 4, tokens=300, dtype=_BF16),
    "extend_d128_window": lambda: _attention(_EXTEND, 128, 8, tokens=300, dtype=_FP16, window=128),
    "extend_d256_cap": lambda: _attention(_EXTEND, 256, 2, tokens=300, dtype=_BF16, soft_cap=50.0),
    "extend_short_d128": lambda: _attention(_EXTEND, 128, 4, tokens=1, dtype=_BF16),
    "extend_short_d256": lambda: _attention(_EXTEND, 256, 4, tokens=1, dtype=_BF16, window=99),
    "decode_d64_g3": lambda: _attention(_DECODE, 64, 3, tokens=1, dtype=_BF16, page_size=1),
    "decode_d80_sinks": lambda: _attention(_DECODE, 80, 1, tokens=1, dtype=_FP16, sinks=True),
    "decode_d128_g4": lambda: _attention(_DECODE, 128, 4, tokens=1, dtype=_BF16),
    "decode_d128_window": lambda: _attention(_DECODE, 128, 8, tokens=1, dtype=_BF16, window=128),
    "decode_d256_cap": lambda: _attention(_DECODE, 256, 24, tokens=1, dtype=_BF16, soft_cap=50.0),
    "extend_d128_f32": lambda: _attention(_EXTEND, 128, 4, tokens=300, dtype=_FP32),
    "decode_d128_f32": lambda: _attention(_DECODE, 128, 4, tokens=1, dtype=_FP32),
    "extend_d128_int8": lambda: _attention(_EXTEND, 128, 4, tokens=300, dtype=_BF16, kv_codes=_INT8),
    "decode_d128_fp8": lambda: _attention(_DECODE, 128, 4, tokens=1, dtype=_BF16, kv_codes=_FP8),
    "decode_d64_int8": lambda: _attention(_DECODE, 64, 3, tokens=1, dtype=_FP16, kv_codes=_INT8),
    "elementwise_bf16": lambda: _elementwise(_BF16),
    "recurrent_bf16": lambda: _recurrent(
        torch.empty(4, 12288, dtype=_BF16)[:, :8192],
        _recurrent_rows(partial(torch.zeros, dtype=torch.int64), 4),
    ),
    "experts_bf16": lambda: _experts(_BF16),
    "experts_fp16_biases": lambda: _experts(_FP16, biases=True),
    "experts_f32": lambda: _experts(_FP32),
    "experts_int4": lambda: _experts(_BF16, kind="int4"),
    "experts_mxfp4": lambda: _experts(_BF16, biases=True, kind="mxfp4", group=32),
    "linear_few_int4": lambda: _coded("int4", tokens=1, zeros=True),
    "linear_few_int8": lambda: _coded("int8", tokens=9, group=4096),
    "linear_few_fp8": lambda: _coded("fp8", tokens=1),
    "linear_many_fp8": lambda: _coded("fp8", tokens=300),
    "experts_nf4": lambda: _experts(_BF16, kind="nf4", group=64),
    "linear_few_nf4": lambda: _coded("nf4", tokens=1, group=64),
    "linear_many_nf4": lambda: _coded("nf4", tokens=300, group=64),
    "linear_few_mxfp4": lambda: _coded("mxfp4", tokens=1, group=32),
    "linear_many_mxfp4": lambda: _coded("mxfp4", tokens=300, group=32),
    "linear_narrow_int4": lambda: _coded("int4", tokens=1, dtype=_FP16, group=32),
    "linear_many_int4": lambda: _coded("int4", tokens=300, zeros=True),
    "linear_many_int8": lambda: _coded("int8", tokens=300, zeros=True),
    "linear_int4_f32": lambda: _coded("int4", tokens=300, dtype=_FP32, zeros=True),
    "sample_greedy": lambda: _sampling(greedy=True, filtered=False, extras=False),
    "sample_plain": lambda: _sampling(greedy=False, filtered=False, extras=False, dtype=_BF16),
    "sample_filtered": lambda: _sampling(greedy=False, filtered=True, extras=True),
}  # fmt: skip


def _steps(rows: int, offset: int) -> Iterator[Callable[[], Any]]:
    """Every op of a step of so many rows, whose inputs begin `offset` elements into the step's one
    upload. What is not a step's own is the same each time."""

    def ints(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(offset + count, dtype=dtype)[offset:]

    def floats(count: int) -> torch.Tensor:
        return torch.ones(offset + count)[offset:]

    k_pool, v_pool = torch.empty(2, 64 * 16, 2, 64)
    q, k, v = torch.empty(rows, 8, 64).split((4, 2, 2), dim=1)
    longs = partial(ints, dtype=torch.int64)
    for op in (_EXTEND, _DECODE):
        batch = AttentionBatch(
            torch.zeros(16, 64, dtype=torch.int32), ints(rows), ints(rows + 1), ints(rows),
            page_size=16, max_q_len=1, max_kv_len=37 * rows,
        )  # fmt: skip
        yield partial(op, q, k_pool, v_pool, batch, AttentionSpec(0.125))
    yield partial(store_kv.store_kv, k, v, k_pool, v_pool, longs(rows))
    yield partial(rotary.rotary, q, k, longs(rows), torch.empty(8, 64), interleaved=False)
    yield partial(
        place_heads.place_heads, q, k, v, k_pool, v_pool, longs(rows), longs(rows),
        q_norm=None, k_norm=HeadNorm(torch.ones(64), 1e-5), rope=torch.empty(8, 64),
        interleaved=False,
    )  # fmt: skip
    yield partial(rms_norm.rms_norm, q, torch.ones(64), 1e-5)
    yield partial(activation.silu_and_mul, torch.empty(rows, 128))
    yield partial(_experts, _FP32, tokens=rows)
    yield partial(_coded, "int4", tokens=min(rows, 16), dtype=_FP32)
    yield partial(_coded, "int4", tokens=rows + 16, dtype=_FP32)
    yield partial(_recurrent, torch.empty(rows, 8192), _recurrent_rows(longs, rows))
    s = SamplingTensors(
        floats(rows), ints(rows), floats(rows), floats(rows), longs(rows), longs(rows), False, True,
        bias=(longs(rows), longs(rows), floats(rows)), banned=(longs(rows), longs(rows)),
        mask_rows=longs(rows), mask_bits=ints(32 * rows).view(rows, 32),
        penalties=Penalties(
            ints(rows), floats(rows), floats(rows), floats(rows),
            torch.zeros(8, 1000, dtype=torch.bool), torch.zeros(8, 1000, dtype=torch.int32),
        ),
    )  # fmt: skip
    yield partial(sampling.sample, torch.empty(rows, 1000), s)


# Rows and offset: one row, as many as a multiple of 16, neither; aligned to 16 bytes and not.
STEPS = ((1, 0), (16, 4), (17, 1), (3, 3))


def print_sources() -> None:
    for rows, offset in STEPS:
        for call in _steps(rows, offset):
            for launch in record_launches(call):
                source = source_of(launch)
                told = {
                    "step": [rows, offset],
                    "kernel": launch.function.__name__,
                    "specialized_on": repr((source.signature, source.constants, source.attrs)),
                    "tf32": rows == 1 and rounds_products(launch),
                }
                print(json.dumps(told), flush=True)


def targets_of(case: str) -> list[str]:
    turn = list(CASES).index(case)
    return ["sm_90", DATACENTRE[turn % 3], CONSUMER[turn // 2 % 3]]


def main(arguments: list[str]) -> None:
    if arguments == ["sources"]:
        return print_sources()
    every, cases = arguments[0] == "every", arguments
    if every:
        cases = arguments[1:]
    if "/" in cases[0]:
        part, parts = map(int, cases[0].split("/"))
        cases = list(CASES)[part::parts]
    for case in cases:
        for target in TARGETS if every else targets_of(case):
            chip = Mock(return_value=CHIPS.get(target, Chip()))
            with (
                patch.object(extend_attention, "chip_of", chip),
                patch.object(decode_attention, "chip_of", chip),
                patch.object(experts, "chip_of", chip),
                patch.object(coded_linear, "chip_of", chip),
            ):
                launches = record_launches(CASES[case])
            for launch in launches:
                result = asdict(compile_launch(launch, target))
                print(json.dumps({"case": case} | result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
