"""One tiny model for all tests of this folder, and two servers for those that only ask."""

from __future__ import annotations

import pytest

from tests.process.http_user import User
from tests.process.server_process import ServerProcess, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def options(tiny_model, tmp_path):
    """Options that every server here is started with; its cache is the test's own."""
    return (
        "--model",
        str(tiny_model),
        "--port",
        "0",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--cpu-kernels",
        "torch",
    )


@pytest.fixture(scope="session")
def chatter():
    """A user of the default model, in a form that is the same on every machine."""
    options = ("--port", "0", "--cors-allow-origins", "*", "--dtype", "bfloat16")
    with ServerProcess(*options) as server:
        yield User(server.url())
        server.terminate()
        assert server.exit_status() == 0


@pytest.fixture(scope="session")
def completer(tmp_path_factory):
    """A user of a model without a chat template, computed by torch alone."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "no-template")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"chat_template"', '"no_template"'))
    options = ("--model", str(model), "--port", "0", "--cpu-kernels", "torch", "--dtype", "float32")
    with ServerProcess(*options) as server:
        yield User(server.url())
        server.terminate()
        assert server.exit_status() == 0


@pytest.fixture(params=["chatter", "completer"])
def completions_user(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["chatter completions", "chatter chat", "completer completions"])
def way(request):
    """Every way in: a user, and the kind of request."""
    user, kind = request.param.split()
    return request.getfixturevalue(user), kind


@pytest.fixture
def user(way):
    return way[0]


@pytest.fixture
def kind(way):
    return way[1]
