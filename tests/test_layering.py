"""The import rule and what follows from it, read from the sources.

server -> runtime -> ops, never back. What decides (runtime.scheduling), what simulates and the
records they share need the standard library only; asyncio lives in server, torch does not; only
the files that own a device ask what kind it is.
"""

from __future__ import annotations

import ast
import gc
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "runtime", "ops")
# Builds a real runner, so it reaches the layers below; it does so when it is called.
LOADING = "server/loading.py"
STANDARD_LIBRARY_ONLY = (
    "runtime/scheduling/",
    "runtime/simulation/",
    "runtime/config.py",
    "runtime/errors.py",
    "runtime/examination.py",
    "runtime/options.py",
    "runtime/percentiles.py",
    "runtime/private_files.py",
    "runtime/sizing.py",
    "runtime/request.py",
    "runtime/runner.py",
    "runtime/rope_layout.py",
)
MAY_ASK_THE_DEVICE = (
    "runtime/execution/device.py",
    "runtime/execution/cuda_graph_runner.py",
    "ops/gpu/",
)
TOP_LEVEL = {"server", "runtime", "ops", "tests", "scripts", "docs", "deploy"}
TOP_LEVEL |= {"README.md", "LICENSE", "CHANGELOG.md"}
TOP_LEVEL |= {"pyproject.toml", ".ci", ".gitignore", ".pre-commit-config.yaml"}
MADE_BY_TOOLS = {"build", "dist", "__pycache__", ".git", ".venv", ".venv.lock"}


@pytest.fixture(scope="module", autouse=True)
def syntax_trees():
    """A million objects, none of which is garbage before the last test here is over."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


def sources() -> list[str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / source).read_text())))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions included."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def offences(files: list[str], forbidden) -> list[str]:
    """Imports in `files` of modules for which `forbidden(top, module)` is true."""
    return [
        f"{source}:{line}: imports {module}"
        for source in files
        for line, module in imports(source)
        if forbidden(module.partition(".")[0], module)
    ]


def files_of(*prefixes: str) -> list[str]:
    found = [source for source in sources() if source.startswith(prefixes)]
    assert found, prefixes
    return found


def test_runtime_imports_nothing_of_server():
    assert offences(files_of("runtime/"), lambda top, _: top == "server") == []


def test_ops_imports_nothing_of_the_project_but_ops():
    assert offences(files_of("ops/"), lambda top, _: top in ("server", "runtime")) == []


def test_scheduling_and_simulation_use_the_standard_library_only():
    def forbidden(top: str, module: str) -> bool:
        if top == "runtime":
            layer = module.replace(".", "/")
            return not any(
                layer.startswith(p.rstrip("/").removesuffix(".py")) for p in STANDARD_LIBRARY_ONLY
            )
        return top not in sys.stdlib_module_names

    assert offences(files_of(*STANDARD_LIBRARY_ONLY), forbidden) == []


def test_runtime_knows_no_asyncio():
    assert offences(files_of("runtime/", "ops/"), lambda top, _: top == "asyncio") == []


def test_server_imports_no_torch_and_reaches_execution_only_to_load():
    def forbidden(top: str, module: str) -> bool:
        return top in ("torch", "triton", "ops") or module.startswith("runtime.execution")

    files = [source for source in files_of("server/") if source != LOADING]
    assert offences(files, forbidden) == []


# The packages of server/, from the ground up: each may import those before it, and runtime.
SERVER_PACKAGES = (
    "bench",
    "http",
    "text",
    "grammars",
    "generation",
    "formats",
    "observability",
    "service",
    "api",
    "middlewares",
    "app",
)


def test_packages_of_server_import_downwards_only():
    """Imports for types alone and inside functions count: they couple as much as any other."""
    floor = {package: number for number, package in enumerate(SERVER_PACKAGES)}
    wrong = []
    for source in files_of(*(f"server/{package}" for package in SERVER_PACKAGES)):
        package = source.split("/")[1].removesuffix(".py")
        for line, module in imports(source):
            top, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if top == "server" and other in floor and floor[other] > floor[package]:
                wrong.append(f"{source}:{line}: {package} imports {module}")
    assert wrong == []


def test_what_loads_a_server_shares_nothing_with_it():
    """It would measure itself; and it starts without what a server needs."""
    own, version = "server.bench", "server.version"
    inside = files_of("server/bench/")
    allowed = (own, version, "runtime.errors", "runtime.percentiles")
    ours = offences(inside, lambda top, name: top in PACKAGES and not name.startswith(allowed))
    assert ours == []
    outside = [s for s in sources() if s not in (*inside, "server/__main__.py")]
    assert offences(outside, lambda _, name: name.startswith(own)) == []


def test_nothing_that_can_be_imported_is_named_by_a_circle():
    """No file reaches itself through what it imports, for types alone and inside functions too."""
    modules = {source.removesuffix(".py").replace("/", "."): source for source in sources()}
    reached = {
        module: {found for _, found in imports(source) if found in modules}
        for module, source in modules.items()
    }
    circles = [sorted(group) for group in strongly_connected(reached) if len(group) > 1]
    assert circles == []


def strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach one another (Kosaraju's algorithm)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]], found: list[str]) -> None:
        seen.add(start)
        for module in edges[start]:
            if module not in seen:
                visit(module, edges, found)
        found.append(start)

    for module in graph:
        if module not in seen:
            visit(module, graph, order)
    backwards: dict[str, set[str]] = {module: set() for module in graph}
    for module, others in graph.items():
        for other in others:
            backwards[other].add(module)
    seen.clear()
    groups: list[set[str]] = []
    for module in reversed(order):
        if module not in seen:
            group: list[str] = []
            visit(module, backwards, group)
            groups.append(set(group))
    return groups


# Their subject is what the tests have: whole servers without a model, worlds, fleets.
RUNS_WHAT_TESTS_RUN = {
    "bench_watching",
    "check_fleet",
    "_profiled_server",
    "simulate_server",
    "soak",
}


def test_scripts_need_no_tests():
    scripts = [str(path.relative_to(ROOT)) for path in (ROOT / "scripts").rglob("*.py")]
    others = [source for source in scripts if Path(source).stem not in RUNS_WHAT_TESTS_RUN]
    assert offences(others, lambda top, _: top == "tests") == []


def test_init_files_of_runtime_stay_empty():
    inits = [source for source in files_of("runtime/") if source.endswith("/__init__.py")]
    assert [source for source in inits if (ROOT / source).read_text().strip()] == []


def device_questions(source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "type"):
            text = ast.unparse(node)
            if text == "torch.cuda" or node.attr == "is_cuda" or text.endswith("device.type"):
                yield f"{source}:{node.lineno}: {text}"


def test_only_the_owners_of_a_device_ask_what_kind_it_is():
    files = [source for source in sources() if not source.startswith(MAY_ASK_THE_DEVICE)]
    assert [question for source in files for question in device_questions(source)] == []


def test_top_level_holds_the_fixed_list_only():
    present = {path.name for path in ROOT.iterdir()}
    present = {name for name in present if not name.endswith(("_cache", ".egg-info"))}
    assert present - MADE_BY_TOOLS - {".hypothesis", ".pytest_cache"} <= TOP_LEVEL


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def modules_of(*prefixes: str) -> list[str]:
    names = [source.removesuffix(".py").replace("/", ".") for source in files_of(*prefixes)]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize(
    ("prefixes", "absent"),
    [
        pytest.param(STANDARD_LIBRARY_ONLY, ("torch", "numpy", "asyncio"), id="scheduling"),
        pytest.param(("server/",), ("torch", "triton"), id="server"),
    ],
)
def test_fresh_interpreter_stays_free_of(prefixes, absent):
    names = [name for name in modules_of(*prefixes) if name != "server.__main__"]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    code += f"print(*[name for name in {absent!r} if name in sys.modules])"
    assert run_python(code) == ""


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    """An import cycle shows only in the module that is imported first, so each gets its turn;
    what is not the project's own stays loaded, or this would take a minute."""
    names = modules_of(
        "server/", "runtime/scheduling/", "runtime/simulation/", "runtime/checkpoints/"
    )
    code = f"""
import importlib, sys
for name in {names!r}:
    for loaded in [key for key in sys.modules if key.partition(".")[0] in {PACKAGES!r}]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""
    assert run_python(code) == ""


def test_help_answers_within_a_second_of_processor_time():
    """Processor time, since the wall clock measures this machine's other work too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "server", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "--model" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
