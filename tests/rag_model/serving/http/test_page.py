"""The page in a real browser, with a real service: what people see, and that hostile text is never executed."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from rag_model.generate.transformer import CausalGenerator
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.store.store import Store
from tests.fixtures.browser import TIMEOUT_MS, run_chromium
from tests.fixtures.paused_generator import PausedDecoding
from tests.fixtures.serving import HttpService, SearchGate, make_settings, run_service, wait_until
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_generators import save_llama
from tests.fixtures.tiny_rag import save_tiny_rag
from tests.fixtures.tiny_snapshot import publish_tiny

pytestmark = pytest.mark.xdist_group("page")
expect.set_options(timeout=TIMEOUT_MS)
ARTICLES = {
    "Denali": "Denali is the highest mountain of Alaska, in the Alaska Range.",
    "Mountains of Asia": "Many mountains of Asia are higher; none of them is in the Arctic.",
    "The <script>window.hacked=1</script>": "Said <img src='x' onerror='window.hacked=2'> & <b>b</b> of the mountain.",
}
READ_SHARES = "(all) => all.map((element) => Number(element.style.getPropertyValue('--share')))"
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
def service(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with run_service(store.url, tmp_path_factory.mktemp("dest")) as service:
        yield service


@pytest.fixture(scope="module")
def answering_service(
    request: pytest.FixtureRequest, store: Store, encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpService]:
    """A service with a RAG model of the kind that the test names."""
    model = save_tiny_rag(tmp_path_factory.mktemp("rag") / "model", encoder, request.param)
    with run_service(store.url, tmp_path_factory.mktemp("answers"), model=str(model)) as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_chromium() as browser:
        yield browser


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that must raise no error, and must send requests only to the service."""
    page_errors: list[str] = []
    hosts: set[str] = set()
    page = context.new_page()
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or ""))
    yield page
    assert page_errors == []
    assert hosts <= {"127.0.0.1", ""}


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")


def test_question_shows_passages_with_marked_words_and_sources(page: Page, service: HttpService) -> None:
    page.goto(service.url)
    snapshot = service.snapshot()["snapshot"]
    expect(page.locator("#foot")).to_contain_text(f"snapshot {snapshot[:12]} · latest@1 · just now")
    expect(page.locator("#about")).to_have_text("3 passages, open to your question.")
    expect(page.locator("#verbs")).to_be_hidden()  # no model is served
    page.keyboard.type("Which is the highest MOUNTAIN in alaska?")  # The input has the focus.
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


def test_question_has_a_url_and_can_be_navigated_back(page: Page, service: HttpService) -> None:
    page.goto(f"{service.url}/#q=who+is+the+king%3F&k=3")
    expect(page.get_by_label("Your question")).to_have_value("who is the king?")
    expect(page.get_by_label("Passages", exact=True).first).to_be_visible()
    expect(page.locator("#kind")).to_be_hidden()  # All passages are prose.
    expect(page.locator(".passage")).to_have_count(3)
    ask(page, "Denali")
    expect(page).to_have_title("Denali · bookwheel")
    page.go_back()
    expect(page).to_have_title("who is the king? · bookwheel")
    expect(page.get_by_label("Your question")).to_have_value("who is the king?")


def test_page_searches_with_the_chosen_retriever(
    page: Page, encoder: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    tables = {"chunk": {"structures": ["tables"]}}
    publish_tiny(store, encoder, ARTICLES, tmp_path_factory.mktemp("work"), bm25=True, recipe=tables)
    with run_service(store.url, tmp_path / "dest") as service:
        page.goto(service.url)
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


def test_hostile_text_is_shown_and_not_executed(page: Page, service: HttpService) -> None:
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


def test_content_security_policy_blocks_foreign_scripts(page: Page, service: HttpService) -> None:
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


def test_errors_are_shown_as_sentences(page: Page, context: BrowserContext, service: HttpService) -> None:
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


def test_full_queue_is_reported(page: Page, store: Store, tmp_path: Path) -> None:
    gate = SearchGate()
    with (
        run_service(store.url, tmp_path, make_settings(queue_questions=1), gate) as service,
        ThreadPoolExecutor(2) as pool,
    ):
        page.goto(service.url)
        expect(page.locator("#foot")).to_contain_text("snapshot")
        gate.open.clear()
        try:
            first_search = pool.submit(service.search, "the first is held up")
            wait_until(gate.is_waiting.is_set)
            second_search = pool.submit(service.search, "the second waits")
            wait_until(lambda: service.service._search_batcher.queued_questions == 1)
            ask(page, "the third?")
            expect(page.get_by_role("alert")).to_contain_text("Too many questions are waiting.")
        finally:
            gate.open.set()
        assert first_search.result()
        assert second_search.result()


def test_service_without_a_snapshot_is_reported(page: Page, store: Store, tmp_path: Path) -> None:
    with run_service(store.url, tmp_path, ready=False, ref="unknown") as service:
        page.goto(service.url)
        expect(page.locator("#foot")).to_contain_text("The library is not ready to answer.")
        ask(page, "who?")
        expect(page.get_by_role("alert")).to_contain_text(
            "The library is not ready to answer. Try again in a moment. (no"
        )


def test_page_fits_a_phone_and_has_a_dark_theme(browser: Browser, service: HttpService) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 700}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(f"{service.url}/#q=highest+mountain")
    expect(page.locator(".passage")).to_have_count(3)
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    context.close()
    assert len(colours) == 2


@pytest.mark.parametrize("answering_service", ["token", "sequence"], indirect=True)
def test_answer_shows_the_weights_of_its_passages(page: Page, answering_service: HttpService) -> None:
    page.goto(answering_service.url)
    ask(page, "Which is the highest mountain?")
    expect(page.locator(".passage")).to_have_count(3)
    expect(page.locator("#foot")).to_contain_text("model")
    request = {"questions": ["Which is the highest mountain?"], "k": 3}
    answer = answering_service.client.post("/answer", json=request).json()["answers"][0]
    expect(page.locator(".said")).to_contain_text(answer["answer"] or "The model gave no answer.")
    for meter, key in (("found", "weight"), ("carries", "posterior")):
        shares = page.locator(f".meter.{meter} .fill").evaluate_all(READ_SHARES)
        assert shares == pytest.approx([passage[key] for passage in answer["passages"]], abs=1e-6)
    assert page.locator(".parts span").evaluate_all(READ_SHARES) == pytest.approx(shares)
    check_token_notes(page, [token for token in answer["tokens"] if token["text"]])
    page.get_by_label("Passages only").check()
    expect(page.locator("#answer")).to_be_hidden()
    expect(page.locator(".passage")).to_have_count(3)


def test_citation_links_to_the_cited_revision(page: Page, service: HttpService) -> None:
    entry = {"title": "Denali", "section": "", "revision": 7, "revised": "2026-11-01T12:00:00Z"}
    entry |= {"places": [0], "text": "of Alaska", "cut": False}
    urls = ("https://en.wikipedia.org/?oldid=7", "javascript:alert()")
    context = [{**entry, "number": number, "url": url} for number, url in enumerate(urls, start=1)]
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


def check_token_notes(page: Page, answer_tokens: list[dict[str, Any]]) -> None:
    """Check that the note of each token, selected with the keyboard, names the passage with the highest posterior."""
    token_elements, note = page.locator(".token"), page.locator(".token-note")
    assert token_elements.all_text_contents() == [token["text"] for token in answer_tokens]
    for position, token in enumerate(answer_tokens):
        token_elements.first.focus() if position == 0 else page.keyboard.press("ArrowRight")
        expect(token_elements.nth(position)).to_be_focused()
        best = max(range(len(token["posterior"])), key=token["posterior"].__getitem__)
        expect(note).to_contain_text(f"passage {best + 1}")


@pytest.mark.parametrize("answering_service", ["sequence"], indirect=True)
@pytest.mark.parametrize("streams", [True, False])
def test_passages_are_shown_before_the_answer_if_the_browser_reads_streams(
    streams: bool, page: Page, answering_service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not streams:
        page.add_init_script("delete Response.prototype.body")
    page.goto(answering_service.url)
    expect(page.locator("#foot")).to_contain_text("model")
    generator = PausedDecoding(monkeypatch)
    ask(page, "Which is the highest mountain?")
    wait_until(lambda: generator.steps)
    if streams:
        expect(page.locator(".passage")).to_have_count(3)
    expect(page.locator("#status")).to_have_text("Reading…")
    expect(page.locator("#answer")).to_be_hidden()
    generator.resume.set()
    expect(page.locator("#status")).to_contain_text("3 passages in")
    expect(page.locator(".said")).to_have_count(1)
    expect(page.locator(".growing")).to_have_count(0)


def test_answer_that_fails_half_way_is_reported(
    page: Page, store: Store, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_rag(tmp_path / "model", encoder, "sequence")
    with run_service(store.url, tmp_path / "dest", make_settings(request_seconds=0.3), model=str(model)) as service:
        page.goto(service.url)
        expect(page.locator("#foot")).to_contain_text("model")
        generator = PausedDecoding(monkeypatch)
        ask(page, "Which is the highest mountain?")
        expect(page.get_by_role("alert")).to_contain_text(
            "That took too long. Try again in a moment. (no answer within"
        )
        generator.resume.set()


def test_text_of_an_answer_grows_word_by_word(
    page: Page, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama").mkdir()
    model = save_llama(tmp_path / "llama", chat=True)
    settings = ReaderSettings("concat", concat=PromptSettings(instruction="", budget=60))
    with run_service(store.url, tmp_path / "dest", model=str(model), reader_settings=settings) as service:
        page.goto(service.url)
        expect(page.locator("#foot")).to_contain_text("model")
        generator = PausedDecoding(monkeypatch, CausalGenerator, free_steps=24)
        ask(page, "highest mountain?")
        expect(page.locator(".growing")).to_have_text(re.compile(r"\S"))
        expect(page.locator(".passage")).to_have_count(3)
        assert not generator.resume.is_set()
        generator.resume.set()
        expect(page.locator("#status")).to_contain_text("3 passages in")
        expect(page.locator(".growing")).to_have_count(0)
        expect(page.locator(".said")).to_have_text(re.compile(r"\S"))
        expect(page.locator(".meter, .parts")).to_have_count(0)  # no passage has a weight
