"""Chat templates and where tokenizers find them."""

from __future__ import annotations

import json
import shutil
from unittest.mock import Mock

import pytest

from runtime.errors import InvalidRequest, ModelError
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from tests.fakes import CHATML, byte_tokenizer, fake_server
from tests.values import present

COUNT = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1 2 3"}]


def render(source, messages=COUNT, **options):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **options)


def test_by_default_the_last_turn_is_closed_and_a_new_one_opened():
    assert render(CHATML).endswith("1 2 3<|im_end|>\n<|im_start|>assistant\n")
    assert render(CHATML, add_generation_prompt=False).endswith("1 2 3<|im_end|>\n")


@pytest.mark.parametrize("content", ["1 2 3", "1 2 3 ", " 1 2 3"])
@pytest.mark.parametrize("trim", ["", " | trim"], ids=["as-given", "trimming"])
def test_a_continued_message_ends_the_prompt(content, trim):
    source = CHATML.replace("message.content", "message.content" + trim)
    messages = [COUNT[0], {"role": "assistant", "content": content}]
    text = render(source, messages, continue_final_message=True)
    assert text.endswith(content.strip() if trim else content)
    assert text.count("<|im_end|>") == 1


@pytest.mark.parametrize("begun", ["<", "<|", "i", "end", "m", "<|im_end|>", "\n", ""])
def test_a_beginning_that_stands_in_the_closing_tag_too_is_cut_at_its_own_end(begun):
    messages = [COUNT[0], {"role": "assistant", "content": begun}]
    text = render(CHATML, messages, continue_final_message=True)
    assert text == f"<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n{begun}"


def test_content_that_the_template_leaves_out_cannot_be_continued():
    source = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="does not appear"):
        render(source, continue_final_message=True)


def test_documents_are_none_unless_given_as_in_transformers():
    source = "{{ documents is none }} {{ tools is none }}"
    assert render(source) == "True True"
    assert render(source, kwargs={"documents": []}) == "False True"


def test_tools_are_given_under_the_name_that_the_template_reads():
    source = "{{ tools }} {{ xml_tools }}"
    assert render(source, tools=[1], tools_variable="xml_tools") == "None [1]"
    assert render(source, kwargs={"xml_tools": [2]}) == "None [2]"


def test_the_template_for_tools_is_used_where_there_are_tools():
    template = ChatTemplate({"default": "D", "tool_use": "T", "rag": "R"}, {})
    assert template.render(COUNT) == "D"
    assert template.render(COUNT, tools=[{}]) == "T"
    assert ChatTemplate({"rag": "R", "default": "D"}, {}).render(COUNT, tools=[{}]) == "D"


def test_what_templates_may_use():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ thinking }}"
    )
    text = render(source, tools=[{"é": 1}], kwargs={"thinking": "off"})
    assert text == '<s>Count[{"é": 1}]4off'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", "alternate", id="raises"),
        pytest.param("{{ messages[0].content + 5 }}", "TypeError", id="type-error"),
        pytest.param("{{ messages.append(1) }}", "refused", id="changes-what-it-is-given"),
        pytest.param("{{ ''.__class__.__mro__ }}", "refused", id="leaves-the-sandbox"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault(source, message):
    with pytest.raises(InvalidRequest, match=message) as raised:
        render(source)
    assert raised.value.param == "messages"


def test_a_template_that_does_not_compile_is_the_models_fault():
    with pytest.raises(ModelError, match="chat template 'default'"):
        render("{% if %}")


async def test_chat_without_a_template_names_the_lack_of_one():
    async with fake_server(tokenizer=byte_tokenizer(chat_template=None)) as server:
        status, body = await server.post("/v1/chat/completions", {"messages": COUNT})
        assert status == 400
        assert "chat template" in body["error"]["message"]
        assert body["error"]["code"] == "no_chat_template"
        await server.complete(max_tokens=2)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("files", "source"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"tokenizer_config.json": {"chat_template": "A"}}, "A", id="string"),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
            id="named-list",
        ),
        pytest.param({"chat_template.jinja": "J"}, "J", id="jinja-file"),
        pytest.param(
            {"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "A"}},
            "J",
            id="jinja-file-first",
        ),
        pytest.param({"chat_template.json": {"chat_template": "C"}}, "C", id="json-file"),
        pytest.param(
            {
                "chat_template.jinja": "J",
                "additional_chat_templates/tool_use.jinja": "T",
                "tokenizer_config.json": {"chat_template": "A"},
            },
            "J",
            id="jinja-file-and-more",
        ),
    ],
)
def test_templates_are_found_where_models_keep_them(folder, files, source):
    write(folder, files)
    template = Tokenizer.load(folder).chat_template
    assert (None if template is None else template.sources[template.name(tools=False)]) == source
    if template is not None and len(template.sources) > 1:
        assert template.render(COUNT, tools=[{}]) == "T"


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": [{"template": "A"}]}},
        {"tokenizer_config.json": {"chat_template": ["A"]}},
        {"tokenizer_config.json": {"chat_template": {"default": 5}}},
        {"tokenizer_config.json": {"chat_template": 5}},
        {"chat_template.json": "[]"},
        {"chat_template.json": "{"},
    ],
    ids=["no-name", "no-object", "no-text", "number", "no-dictionary", "broken"],
)
def test_templates_that_cannot_be_read_name_the_model(folder, files):
    write(folder, files)
    with pytest.raises(ModelError, match=r"model.*chat_template"):
        Tokenizer.load(folder)


def test_a_template_that_is_not_utf8_names_its_file(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        Tokenizer.load(folder)


def test_a_file_given_as_an_option_replaces_the_models_template(folder, tmp_path):
    (folder / "chat_template.jinja").write_text("J")
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine {{ eos_token }}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    template = present(Tokenizer.load(folder, mine).chat_template)
    assert template.render(COUNT) == "mine <|im_end|>"
    with pytest.raises(ModelError, match=r"no\.jinja"):
        Tokenizer.load(folder, tmp_path / "no.jinja")


def test_a_tokenizer_that_cannot_be_read_names_its_file(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_folder_without_any_tokenizer_says_so(folder, kind):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(folder)


def test_a_conversation_is_tokenized_as_it_is_rendered():
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "é" * 3000}]
    rendered = tokenizer.render_chat(messages)
    assert tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False) == rendered
    tokenizer.close()


async def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it():
    async with fake_server(context_length=64) as server:
        server.service.tokenizer.backend = Mock(side_effect=AssertionError)  # a call would be a 500
        status, body = await server.post("/v1/completions", {"prompt": "x" * 100_000})
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
