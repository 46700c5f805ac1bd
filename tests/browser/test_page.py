"""The page at / in a browser: what its reader does, and what it shows of the server's work.

Every test also holds that nothing complains on the console and that no other host is asked for
anything (`open_page`)."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.simulation.sim_runner import SimRunner
from tests.server.api.test_chat_features import CALL, WEATHER
from tests.server.server_kit import CHATML_TOOLS, say, sim_server
from tests.values import present

pytestmark = pytest.mark.slow

NARROW = {"width": 360, "height": 740}
EVIL = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    "<b>bold</b><iframe srcdoc='x'></iframe>"
)


class Steady(SimRunner):
    """Its steps take long enough to be seen."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, step_seconds=lambda batch: 0.006, **options)


@pytest.fixture(scope="module")
def steady():
    """A server of two rows whose steps take 6 ms."""
    with sim_server(
        CHATML_TOOLS, Steady, reasoning_parser="qwen3", scheduler={"max_running_requests": 2}
    ) as served:
        yield served


def ask(page, text):
    page.fill("#message", text)
    page.press("#message", "Enter")


def answered(page):
    """Waits for the end of the answer; the text of the last one."""
    until(page, lambda: page.evaluate("document.querySelector('#log').ariaBusy === 'false'"))
    return page.locator(".answer > .text").last.inner_text()


def until(page, condition):
    """Waits, letting the page live, until something is as it should be. (`wait_for_function` would
    evaluate in the page, which its policy forbids.)"""
    for _ in range(400):
        if condition():
            return
        page.wait_for_timeout(25)
    raise AssertionError("it did not come to pass")


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_message_is_typed_and_its_answer_streams(open_page, steady):
    page = open_page(steady.url)
    page.locator("#message").press_sequentially(say("ünï " + "word by word " * 10))
    page.keyboard.press("Enter")
    until(
        page,
        lambda: page.evaluate("document.querySelector('.answer > .text')?.innerText.length > 10"),
    )
    partial = page.locator(".answer > .text").inner_text()
    assert page.locator("#send").inner_text() == "Stop"
    whole = answered(page)
    assert whole.startswith("ünï word by word")
    assert whole.startswith(partial.strip())
    assert len(whole) > len(partial)
    assert re.search(
        r"\d+ prompt tokens.* · 13\d tokens · .*first after", page.inner_text(".answer .notes")
    )
    assert page.locator("#send").inner_text() == "Send"


def test_what_a_model_writes_is_never_markup(open_page, talker):
    page = open_page(talker.url)
    for probabilities in (True, False):
        page.locator("#settings > summary").click()
        page.set_checked("#probabilities", probabilities)
        page.locator("#settings > summary").click()
        ask(page, say(f"<think>{EVIL}</think>{EVIL}"))
        assert answered(page) == EVIL
        page.locator(".reasoning > summary").last.click()
        assert page.locator(".reasoning .text").last.inner_text() == EVIL
    assert page.title() == "loomserve"
    assert page.locator("#log :is(script, img, b, iframe)").count() == 0
    assert page.locator(".token").count() == len(EVIL), "one token is one byte here"


# Pieces of text as they come, each with the tokens that came with it, as [text, logprob].
RUNS = """async (events) => {
  const { TokenRuns } = await import('/page/tokens.js');
  const runs = new TokenRuns();
  const token = ([bytes, logprob]) => ({ bytes, logprob });
  return events.flatMap(([text, tokens]) => runs.read(text, tokens.map(token)).map(
    (piece) => [piece.text, piece.tokens.map((one) => one.logprob)],
  ));
}"""


@pytest.mark.parametrize(
    ("events", "pieces"),
    [
        pytest.param(
            [["", [["ab", -1], ["ab", -2]]], ["ab", [["ab", -3]]]], [["ab", [-3]]], id="repeated"
        ),
        pytest.param(
            [["", [["x", -1]]], ["xy", [["y", -2]]], ["z", [["z", -3]]]],
            [["x", [-1]], ["y", [-2]], ["z", [-3]]],
            id="held-back",
        ),
        pytest.param([["ü", [["ü", -1]]]], [["ü", [-1]]], id="one"),
        pytest.param(
            [["ü!", [[b"\xc3", -1], [b"\xbc", -2], ["!", -3]]]],
            [["ü", [-1, -2]], ["!", [-3]]],
            id="cut",
        ),
        pytest.param([["ab", [["abc", -1]]], ["c", []]], [["ab", [-1]], ["c", [-1]]], id="half"),
        pytest.param([["ab", []], ["c", [["c", -1]]]], [["ab", []], ["c", [-1]]], id="unknown"),
    ],
)
def test_tokens_are_laid_under_the_text_that_they_made(open_page, talker, events, pieces):
    def raw(token):
        return list(token if isinstance(token, bytes) else token.encode())

    sent = [[text, [[raw(token), value] for token, value in tokens]] for text, tokens in events]
    assert open_page(talker.url).evaluate(RUNS, sent) == pieces


def test_tool_calls_are_shown_and_their_results_sent(open_page, talker):
    page = open_page(talker.url)
    page.locator("#settings > summary").click()
    page.fill("#tools", json.dumps([WEATHER]))
    ask(page, say("Let me see.\n" + CALL))
    assert answered(page) == "Let me see."
    assert page.inner_text(".call code") == "get_weather"
    assert json.loads(page.inner_text(".call pre")) == {"city": "Paris"}
    page.fill(".call input", say("sunny"))
    page.click(".call button")
    assert answered(page) == "sunny"
    page.fill("#tools", "{")
    ask(page, "once more")
    page.wait_for_selector(".error")
    assert "The tools are no JSON" in page.inner_text(".answer >> nth=-1")


def test_an_answer_is_stopped_and_a_message_edited(open_page, steady):
    page = open_page(steady.url)
    ask(page, say("to be stopped " * 80))
    until(
        page,
        lambda: page.evaluate("document.querySelector('.answer > .text')?.innerText.length > 5"),
    )
    page.click("#send")
    page.wait_for_selector("text=stopped")
    until(page, lambda: not steady.service.engine.scheduler.has_unfinished)
    page.click("text=Edit")
    page.fill(".spoken textarea", say("edited"))
    page.click("text=Send again")
    assert answered(page) == "edited"
    assert page.locator(".spoken").count() == page.locator(".answer").count() == 1
    page.click("#again")
    until(page, lambda: page.locator(".answer .notes", has_text="first after").count() == 1)
    assert answered(page) == "edited"
    page.click("#clear")
    assert page.locator("#log > *").count() == 0


def test_errors_are_shown_as_the_server_says_them(open_page, talker):
    page = open_page(talker.url, expected_errors=("400",))
    page.locator("#settings > summary").click()
    page.fill("[data-field=top_p]", "7")
    ask(page, "hello")
    page.wait_for_selector(".error")
    said = page.inner_text(".error")
    assert "top_p" in said
    assert "7" in said
    page.fill("[data-field=top_p]", "")
    ask(page, say("better"))
    assert answered(page) == "better", "what failed is no part of the conversation"


def test_the_key_is_asked_for_and_kept_for_the_tab(open_page):
    with sim_server(api_key="secret") as served:
        page = open_page(served.url, expected_errors=("401",))
        page.wait_for_selector("#key-dialog[open]")
        assert "no API key" in page.inner_text("#key-dialog .why")
        page.fill("#key-dialog input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=the API key is wrong")
        page.fill("#key-dialog input", "secret\u201d")  # no header can carry this
        page.keyboard.press("Enter")
        page.wait_for_selector("text=it has characters that none has")
        page.fill("#key-dialog input", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=nobody waits")
        ask(page, say("open"))
        assert answered(page) == "open"
        page.reload()
        page.wait_for_selector("text=nobody waits")
        assert not page.locator("#key-dialog").is_visible()
        page.wait_for_selector("#api", state="hidden")  # a link cannot send the key
        assert page.evaluate("localStorage.length") == 0
        assert page.evaluate("document.cookie") == ""


def test_long_prompts_beside_a_stream_make_mixed_steps_and_show_why_they_wait(open_page, steady):
    page = open_page(steady.url)
    ask(page, say("a stream that goes on " * 30))
    until(
        page,
        lambda: page.evaluate("document.querySelector('.answer > .text')?.innerText.length > 5"),
    )
    with ThreadPoolExecutor(4) as pool:
        prompts = [f"{number} {'long ' * 200} {say('done ' * 20)}" for number in range(4)]
        work = [pool.submit(steady.chat, prompt) for prompt in prompts]
        page.wait_for_selector("#requests td:text-is('rows')")
        assert "for a free row" in page.inner_text("#queue")
        waiting = page.locator("#requests tr", has_text="queue 1")
        assert re.search(r"rows\s+[\d.]+ m?s", waiting.inner_text())
        assert all(job.result().choices[0].message.content for job in work)
    until(
        page,
        lambda: page.evaluate(
            "/[1-9]\\d* mixed/.test(document.querySelector('.timeline-summary').innerText)"
        ),
    )
    both = page.evaluate(BOTH_LANES)
    assert both > 0, "a column has a bar of prompt tokens and one of decode rows"
    page.click("#send")


# Columns of the canvas with a bar in the lane of prompt tokens and one in that of decode rows, just
# above the two base lines.
BOTH_LANES = """() => {
  const canvas = document.querySelector('#timeline canvas');
  const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const density = canvas.height / canvas.clientHeight;
  const filled = (x, y) => image.data[4 * (Math.round(y * density) * image.width + x) + 3] > 0;
  let both = 0;
  for (let x = 0; x < image.width; x += 1) {
    both += filled(x, 0.32 * 220 - 3) && filled(x, 0.58 * 220 - 3);
  }
  return both;
}"""


def test_pool_and_prefixes_are_those_of_the_server(open_page, talker):
    talker.chat("shared " * 60 + say("first"))
    page = open_page(talker.url)
    page.wait_for_selector("#runs li")
    now = talker.service.engine.scheduler.statistics()
    figures = [
        int(one.replace(",", ""))
        for one in re.findall(r"[a-z] ([\d,]+) \(", page.inner_text("#pool-figures"))
    ]
    assert figures == [now.free_tokens, now.cached_tokens, now.private_tokens, now.reserved_tokens]
    assert sum(figures) == now.capacity_tokens
    assert re.search(r"\d+ tokens · used", page.inner_text("#runs"))


def test_everything_can_be_reached_by_keys(open_page, talker):
    page = open_page(talker.url)
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type(say("by keys"))
    page.keyboard.press("Enter")
    answered(page)
    until(
        page,
        lambda: page.evaluate(
            "!document.querySelector('.timeline-summary').innerText.startsWith('No')"
        ),
    )
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
        if page.evaluate("document.activeElement.matches('.text.tokens')"):
            page.keyboard.press("ArrowRight")
            assert "%" in page.inner_text("#token-tip")
            page.keyboard.press("Escape")
            assert not page.locator("#token-tip").is_visible()
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            page.keyboard.press("End")
            last = page.inner_text(".timeline-figures")
            page.keyboard.press("ArrowLeft")
            before = page.inner_text(".timeline-figures")
    assert {"send", "clear", "text tokens", "CANVAS", "wide", "SUMMARY"} <= reached
    numbers = [int(present(re.match(r"Step (\d+): ", text))[1]) for text in (before, last)]
    assert numbers[1] == numbers[0] + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_one_view_and_asks_for_nothing_else(open_page, talker, scheme):
    page = open_page(talker.url, viewport=NARROW, color_scheme=scheme)
    page.wait_for_selector("#model:has-text('fake')")
    ask(page, say("unbroken" * 30))
    answered(page)
    assert fits(page)
    assert not page.locator("#live").is_visible()
    until(page, lambda: not talker.service.live.watchers)
    page.click("#show-live")
    page.wait_for_selector("text=nobody waits")
    assert page.locator("#live").is_visible()
    assert not page.locator("#chat").is_visible()
    assert fits(page)
    assert len(talker.service.live.watchers) == 1
    page.click("#show-chat")
    until(page, lambda: not talker.service.live.watchers)
    ground, ink = page.evaluate(
        "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
    )
    assert (brightness(ground) > brightness(ink)) == (scheme == "light")
    assert abs(brightness(ground) - brightness(ink)) > 150


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_a_server_that_comes_back_is_watched_again(open_page):
    with sim_server() as served:
        page = open_page(served.url, expected_errors=("ERR_", "Failed to load"))
        page.wait_for_selector("text=nobody waits")
        loop = present(served.service.engine._task).get_loop()
        loop.call_soon_threadsafe(served.service.live.close)
        page.wait_for_selector("text=The server has ended the view.")
        page.wait_for_selector("text=nobody waits")
        until(page, lambda: len(served.service.live.watchers) == 1)
        assert len(served.service.live.watchers) == 1
