"""The page in a real browser, on a real service: what people see, and what hostile text can't do."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from rag_model.generate.transformer import CausalGenerator
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.store.store import Store
from tests.fixtures.browser import PATIENCE, chromium
from tests.fixtures.paused_generator import Held
from tests.fixtures.serving import Gate, Serving, serving, until, with_limits
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_generators import save_llama
from tests.fixtures.tiny_rag import save_tiny_rag
from tests.fixtures.tiny_snapshot import publish_tiny

pytestmark = pytest.mark.xdist_group("page")
expect.set_options(timeout=PATIENCE)
ARTICLES = {
    "Denali": "Denali is the highest mountain of Alaska, in the Alaska Range.",
    "Mountains of Asia": "Many mountains of Asia are higher; none of them is in the Arctic.",
    "The <script>window.hacked=1</script>": "Said <img src='x' onerror='window.hacked=2'> & <b>b</b> of the mountain.",
}
_SHARES = "(all) => all.map((one) => Number(one.style.getPropertyValue('--share')))"
ENWIKI = {"kind": "wiki", "base": "https://en.wikipedia.org/wiki/Main_Page", "licence": "CC BY-SA 4.0"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def store(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    publish_tiny(store, encoder, ARTICLES, tmp_path_factory.mktemp("work"), corpus=ENWIKI)
    return store


@pytest.fixture(scope="module")
def service(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(store.url, tmp_path_factory.mktemp("dest")) as serves:
        yield serves


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    opened = browser.new_context(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(PATIENCE)
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that nothing goes wrong on, and that asks nobody but the service."""
    wrong: list[str] = []
    hosts: set[str] = set()
    opened = context.new_page()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or ""))
    yield opened
    assert wrong == []
    assert hosts <= {"127.0.0.1", ""}


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")


def test_a_question_finds_passages_with_its_words_marked_and_where_they_are_from(page: Page, service: Serving) -> None:
    page.goto(service.url)
    snapshot = service.snapshot()["snapshot"]
    expect(page.locator("#foot")).to_contain_text(f"snapshot {snapshot[:12]} · latest@1 · just now")
    expect(page.locator("#about")).to_have_text("3 passages, open to your question.")
    expect(page.locator("#verbs")).to_be_hidden()  # no model is served
    page.keyboard.type("Which is the highest MOUNTAIN in alaska?")  # the box has the focus
    page.keyboard.press("Enter")
    denali = page.locator(".passage", has=page.get_by_role("link", name="Denali", exact=True))
    expect(denali).to_have_count(1)
    expect(page.locator(".passage")).to_have_count(3)
    assert denali.locator("mark").all_text_contents() == ["highest", "mountain", "Alaska", "Alaska"]
    asia = page.locator(".passage", has_text="none of them")
    assert asia.locator("mark").all_text_contents() == ["mountains"]
    revision = denali.get_by_role("link", name="Denali", exact=True)
    assert revision.get_attribute("href") == "https://en.wikipedia.org/w/index.php?oldid=1"
    assert revision.get_attribute("rel") == "noopener noreferrer"
    expect(denali.locator("time")).to_have_text("2026-11-01")
    expect(denali.locator("time")).to_have_attribute("datetime", "2026-11-01T12:00:00Z")
    credit = denali.locator(".credit")
    expect(credit).to_have_text("“Denali” by its authors, CC BY-SA 4.0; excerpt, markup removed")
    assert [link.get_attribute("href") for link in credit.get_by_role("link").all()] == [
        "https://en.wikipedia.org/w/index.php?oldid=1",
        "https://en.wikipedia.org/w/index.php?curid=1&action=history",
        "https://creativecommons.org/licenses/by-sa/4.0/",
    ]
    expect(page).to_have_title("Which is the highest MOUNTAIN in alaska? · bookwheel")


def test_a_question_has_an_address_and_a_way_back(page: Page, service: Serving) -> None:
    page.goto(f"{service.url}/#q=who+is+the+king%3F&k=3")
    expect(page.get_by_label("Your question")).to_have_value("who is the king?")
    expect(page.get_by_label("Passages", exact=True).first).to_be_visible()
    expect(page.locator("#kind")).to_be_hidden()  # there is only prose
    expect(page.locator(".passage")).to_have_count(3)
    ask(page, "Denali")
    expect(page).to_have_title("Denali · bookwheel")
    page.go_back()
    expect(page).to_have_title("who is the king? · bookwheel")
    expect(page.get_by_label("Your question")).to_have_value("who is the king?")


def test_the_page_searches_by_the_retriever_that_is_chosen(
    page: Page, encoder: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    tables = {"chunk": {"structures": ["tables"]}}
    publish_tiny(store, encoder, ARTICLES, tmp_path_factory.mktemp("work"), words=True, recipe=tables)
    with serving(store.url, tmp_path / "dest") as serves:
        page.goto(serves.url)
        choice = page.get_by_label("Retriever")
        expect(choice.locator("option")).to_have_text(["hnsw", "bm25", "rrf(hnsw, bm25)"])
        expect(page.locator("#explanation")).to_have_text("by meaning, along a graph of near passages: fast")
        ask(page, "Alaska")
        expect(page.locator(".passage")).to_have_count(3)
        choice.select_option("bm25")
        expect(page.locator("#explanation")).to_have_text("by the words of the question; rare words count more")
        expect(page.locator(".passage")).to_have_count(1)  # BM25 finds only texts with the word
        assert "by=bm25" in page.url
        page.go_back()
        expect(page.locator(".passage")).to_have_count(3)
        expect(choice).to_have_value("hnsw")
        kinds = page.get_by_label("Kind")
        expect(kinds.locator("option")).to_have_text(["any", "prose", "table"])
        kinds.select_option("table")
        expect(page.locator("#error")).to_contain_text("has no passages of kind table, only prose")
        kinds.select_option("prose")
        expect(page.locator(".passage")).to_have_count(3)
        assert "kind=prose" in page.url


def test_hostile_text_is_shown_and_does_nothing(page: Page, service: Serving) -> None:
    question = "<img src=x onerror='window.hacked=2'> \"><script>window.hacked=3</script> mountain"
    page.goto(service.url)
    ask(page, question)
    hostile = page.locator(".passage", has_text="Said")
    expect(hostile.locator(".text")).to_have_text(
        "Said <img src='x' onerror='window.hacked=2'> & <b>b</b> of the mountain."
    )
    expect(hostile.locator("h2")).to_have_text("The <script>window.hacked=1</script>, 2026-11-01")
    assert page.locator("main img, main b b, main script, .text b").count() == 0
    page.goto(f"{service.url}/#q={question}")
    expect(page.locator(".passage")).to_have_count(3)
    assert page.evaluate("window.hacked") is None


def test_the_policy_runs_nothing_that_is_not_ours(page: Page, service: Serving) -> None:
    reply = service.client.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    page.goto(service.url)
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked=1'}))"
    )
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<i onclick=\"window.hacked=1\">x</i>')")
    page.locator("body > i").click()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("fetch('http://127.0.0.1:9/').catch((error) => error.name)") == "TypeError"


def test_errors_are_sentences(page: Page, context: BrowserContext, service: Serving) -> None:
    page.goto(service.url)
    error = page.get_by_role("alert")
    ask(page, "long " * 1000)
    expect(error).to_contain_text("question is not valid. (a question has")
    expect(page.locator(".passage")).to_have_count(0)
    context.set_offline(True)
    ask(page, "who?")
    expect(error).to_have_text("The service cannot be reached. Is it still running?")
    context.set_offline(False)
    ask(page, "who was it?")
    expect(page.locator(".passage")).to_have_count(3)
    expect(error).to_be_hidden()


def test_a_full_queue_says_when_to_come_again(page: Page, store: Store, tmp_path: Path) -> None:
    gate = Gate()
    with serving(store.url, tmp_path, with_limits(queue_questions=1), gate) as busy, ThreadPoolExecutor(2) as others:
        page.goto(busy.url)
        expect(page.locator("#foot")).to_contain_text("snapshot")
        gate.open.clear()
        try:
            held = others.submit(busy.search, "the first is held up")
            until(gate.held.is_set)
            waits = others.submit(busy.search, "the second waits")
            until(lambda: busy.service._search_batcher.queued_questions == 1)
            ask(page, "the third?")
            expect(page.get_by_role("alert")).to_contain_text("Too many questions are waiting.")
        finally:
            gate.open.set()
        assert held.result()
        assert waits.result()


def test_a_service_without_a_snapshot_says_so(page: Page, store: Store, tmp_path: Path) -> None:
    with serving(store.url, tmp_path, ready=False, ref="nobody") as empty:
        page.goto(empty.url)
        expect(page.locator("#foot")).to_contain_text("The library is not ready to answer.")
        ask(page, "who?")
        expect(page.get_by_role("alert")).to_contain_text(
            "The library is not ready to answer. Try again in a moment. (no"
        )


def test_it_fits_a_phone_and_the_night(browser: Browser, service: Serving) -> None:
    pages = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 360, "height": 700}, is_mobile=True, has_touch=True, color_scheme=scheme
        )
        page = context.new_page()
        page.goto(f"{service.url}/#q=highest+mountain")
        expect(page.locator(".passage")).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        pages[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        context.close()
    assert pages["light"] != pages["dark"]


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_an_answer_shows_what_it_was_read_from(
    kind: str, page: Page, store: Store, encoder: Path, tmp_path: Path
) -> None:
    model = save_tiny_rag(tmp_path / "model", encoder, kind)  # type: ignore[arg-type]
    with serving(store.url, tmp_path / "dest", model=str(model)) as reading:
        page.goto(reading.url)
        ask(page, "Which is the highest mountain?")
        expect(page.locator(".passage")).to_have_count(3)
        expect(page.locator("#foot")).to_contain_text("model")
        with httpx.Client() as client:
            request = {"questions": ["Which is the highest mountain?"], "k": 3}
            told = client.post(f"{reading.url}/answer", json=request, timeout=PATIENCE).json()["answers"][0]
        expect(page.locator(".said")).to_contain_text(told["answer"] or "The model gave no answer.")
        for meter, key in (("found", "weight"), ("carries", "posterior")):
            shown = page.locator(f".meter.{meter} .fill").evaluate_all(_SHARES)
            assert shown == pytest.approx([one[key] for one in told["passages"]], abs=1e-6)
        assert page.locator(".parts span").evaluate_all(_SHARES) == pytest.approx(shown)
        _check_tokens(page, [token for token in told["tokens"] if token["text"]])
        page.get_by_label("Passages only").check()
        expect(page.locator("#answer")).to_be_hidden()
        expect(page.locator(".passage")).to_have_count(3)


def test_a_citation_leads_to_the_revision_that_it_names(page: Page, service: Serving) -> None:
    entry = {
        "number": 1,
        "title": "Denali",
        "section": "",
        "revision": 7,
        "revised": "2026-11-01T12:00:00Z",
        "places": [0],
        "text": "of Alaska",
        "cut": False,
    }
    context = [
        {**entry, "url": "https://en.wikipedia.org/?oldid=7"},
        {**entry, "number": 2, "url": "javascript:alert()"},
    ]
    answer = {"question": "?", "answer": "Denali [1, 2] in [2024] <b>", "ended": True, "log_likelihood": None}
    answer |= {"passages": [], "tokens": [], "context": context, "statements": [], "citations": [1, 2]}
    reply = {"snapshot": service.snapshot()["snapshot"], "model": "m", "answers": [answer]}
    page.route("**/snapshot", lambda route: route.fulfill(json={**service.snapshot(), "model": "m"}))
    page.route("**/answer", lambda route: route.fulfill(json=reply))
    page.goto(service.url)
    ask(page, "Which is the highest mountain?")
    expect(page.locator(".said")).to_have_text("Denali [1, 2] in [2024] <b>")
    links = page.locator(".said a")
    expect(links).to_have_count(1)
    expect(links).to_have_attribute("href", "https://en.wikipedia.org/?oldid=7")
    expect(links).to_have_attribute("title", "Denali, 2026-11-01")
    answer |= {"answer": "", "citations": [], "abstained": True}
    page.get_by_label("Your question").fill("Who?")
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_have_text("The library does not contain the answer.")


def _check_tokens(page: Page, told: list[dict[str, Any]]) -> None:
    """Of RAG-Token, each token can be asked whose it is, from the keyboard."""
    tokens, note = page.locator(".token"), page.locator(".token-note")
    assert tokens.all_text_contents() == [token["text"] for token in told]
    for place, token in enumerate(told):
        tokens.first.focus() if place == 0 else page.keyboard.press("ArrowRight")
        expect(tokens.nth(place)).to_be_focused()
        best = max(range(len(token["posterior"])), key=token["posterior"].__getitem__)
        expect(note).to_contain_text(f"passage {best + 1}")


@pytest.mark.parametrize("streams", [True, False])
def test_passages_come_before_the_answer_where_a_browser_reads_streams(
    streams: bool, page: Page, store: Store, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_rag(tmp_path / "model", encoder, "sequence")
    with serving(store.url, tmp_path / "dest", model=str(model)) as reading:
        if not streams:
            page.add_init_script("delete Response.prototype.body")
        page.goto(reading.url)
        expect(page.locator("#foot")).to_contain_text("model")
        held = Held(monkeypatch)
        ask(page, "Which is the highest mountain?")
        until(lambda: held.steps)
        if streams:
            expect(page.locator(".passage")).to_have_count(3)
        expect(page.locator("#status")).to_have_text("Reading…")
        expect(page.locator("#answer")).to_be_hidden()
        held.go.set()
        expect(page.locator("#status")).to_contain_text("3 passages in")
        expect(page.locator(".said")).to_have_count(1)
        expect(page.locator(".growing")).to_have_count(0)


def test_an_answer_that_fails_half_way_is_told(
    page: Page, store: Store, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_rag(tmp_path / "model", encoder, "sequence")
    with serving(store.url, tmp_path / "dest", with_limits(request_seconds=0.3), model=str(model)) as reading:
        page.goto(reading.url)
        expect(page.locator("#foot")).to_contain_text("model")
        held = Held(monkeypatch)
        ask(page, "Which is the highest mountain?")
        expect(page.get_by_role("alert")).to_contain_text(
            "That took too long. Try again in a moment. (no answer within"
        )
        held.go.set()


def test_words_come_one_by_one_from_one_prompt(
    page: Page, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama").mkdir()
    model = save_llama(tmp_path / "llama", chat=True)
    read = ReaderSettings("concat", concat=PromptSettings(instruction="", budget=60))
    with serving(store.url, tmp_path / "dest", model=str(model), reader_settings=read) as reading:
        page.goto(reading.url)
        expect(page.locator("#foot")).to_contain_text("model")
        held = Held(monkeypatch, CausalGenerator, free=24)
        ask(page, "highest mountain?")
        expect(page.locator(".growing")).to_have_text(re.compile(r"\S"))
        expect(page.locator(".passage")).to_have_count(3)
        assert not held.go.is_set()
        held.go.set()
        expect(page.locator("#status")).to_contain_text("3 passages in")
        expect(page.locator(".growing")).to_have_count(0)
        expect(page.locator(".said")).to_have_text(re.compile(r"\S"))
        expect(page.locator(".meter, .parts")).to_have_count(0)  # no passage has a weight
