"""Published attacks by what a model brings along: no code of a checkpoint ever runs."""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
from runtime.checkpoints.gguf_tokenizer import write_tokenizer
from runtime.checkpoints.model_folder import model_folder
from runtime.config import RunnerConfig
from runtime.errors import InvalidRequest, LoomserveError, ModelError
from server.loading import sampling_defaults
from server.text.tokenizer import Tokenizer
from tests.process.server_process import write_tiny_model
from tests.runtime.checkpoints.tiny_models import make_llama, write_gguf

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def ran(tmp_path):
    """A file that is there once any code of the checkpoint has run."""
    return tmp_path / "ran"


class _Payload:
    """What a pickle of this does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_that_a_config_names_is_not_run(tmp_path, ran):
    """auto_map in the config of the model and of the tokenizer, the module beside it."""
    folder = write_tiny_model(tmp_path / "model")
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
    for name in ("evil", "modeling_llama", "tokenization_llama", "configuration_llama"):
        (folder / f"{name}.py").write_text(code + "class Evil: ...\nclass EvilTokenizer: ...\n")
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        config["auto_map"] = {
            "AutoConfig": "evil.Evil",
            "AutoModelForCausalLM": "evil.Evil",
            "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"],
        }
        config["trust_remote_code"] = True
        config["tokenizer_class"] = "EvilTokenizer"
        (folder / name).write_text(json.dumps(config))
    with pytest.raises(ModelError, match="custom code"):  # a class that is there only as code
        Tokenizer.load(folder)
    _build(folder)
    assert not ran.exists()


def _build(folder: Path) -> None:
    from runtime.execution.build import build_runner

    runner, _ = build_runner(
        RunnerConfig(model=str(folder), device="cpu", cpu_kernels="torch", max_total_tokens=256),
        page_size=16,
        max_running_requests=2,
        max_prefill_tokens=64,
    )
    runner.close()


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.safetensors", "consolidated.00.pth", "tokenizer.json",
     "tokenizer_config.json", "config.json", "generation_config.json"],
)  # fmt: skip
def test_a_pickle_in_place_of_any_file_is_not_read_as_one(tmp_path, ran, name):
    folder = write_tiny_model(tmp_path / "model")
    if not name.endswith(".json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Payload(ran)))

    def load() -> None:
        Tokenizer.load(model_folder(folder, tmp_path / "cache", print)).close()
        sampling_defaults("auto", folder)
        _build(folder)

    with pytest.raises(LoomserveError):
        load()
    assert not ran.exists()


TEMPLATES = [
    "{{ cycler.__init__.__globals__.os.popen('touch RAN').read() }}",
    "{{ lipsum.__globals__['os'].system('touch RAN') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ raise_exception.__globals__['os'].system('touch RAN') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__call__.__self__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ '%s'.format.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{0.__class__}' ~ '').format_map({'0': 1}).x.y }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ self._TemplateReference__context.environment }}{{ namespace.__init__.__globals__ }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_of_a_gguf_file_does_not_leave_its_sandbox(tmp_path, ran, template):
    template = template.replace("RAN", str(ran))
    model = make_llama()
    file = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType.F32, template=template)
    (tmp_path / "folder").mkdir()
    write_tokenizer(GgufCheckpoint(file), tmp_path / "folder")
    tokenizer = Tokenizer.load(tmp_path / "folder")
    try:
        text = tokenizer.render_chat(MESSAGES)
    except InvalidRequest as error:  # refused, or what it is denied is empty
        assert "chat template" in str(error)  # noqa: PT017
        text = ""
    finally:
        tokenizer.close()
    assert not [word for word in ("class", "module", "function", "root:", " at 0x") if word in text]
    assert not ran.exists()


RUNS_CODE = {"eval", "exec", "compile", "__import__"}
READS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}


@pytest.mark.parametrize("folder", ["server", "runtime", "ops"])
def test_no_module_can_run_what_it_reads(folder):
    """No pickles, no evaluated text, no torch.load: that is the whole of how others were entered.
    (re.compile and the like are methods; triton compiles our own kernels.)"""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & RUNS_CODE
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = {f"{node.value.id}.{node.attr}"} & {"torch.load", "np.load", "numpy.load"}
                names |= {"trust_remote_code"} & {node.attr}
            elif isinstance(node, ast.keyword) and node.arg in (
                "trust_remote_code",
                "allow_pickle",
            ):
                is_off = isinstance(node.value, ast.Constant) and node.value.value is False
                names = set() if is_off else {node.arg}
                found += [f"{where} {name}" for name in names]
                continue
            else:
                continue
            allowed = READS_CODE | RUNS_CODE | {"torch.load", "np.load", "numpy.load"}
            found += [f"{where} {name}" for name in names & allowed]
    assert found == []


def test_the_table_of_attacks_names_tests_that_are_there():
    text = (ROOT / "docs/security.md").read_text()
    table = text.partition("| kind | published as | test |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`((?:\w+/)+(?:test_\w+\.py)?)`", row)
        assert all((ROOT / "tests" / name).exists() for name in named), row
        assert named, row
        for fragment in re.findall(r"`\.*(?:test)?_?(\w+)\.\.\.`", row):
            files = [path for name in named for path in [ROOT / "tests" / name] if path.is_file()]
            assert any(fragment in path.read_text() for path in files), (fragment, row)
