"""The chat page in a real Chromium with a real server: streaming, tinted drafts, modes, stopping, keys, themes.

SLIPSTREAM_SCREENSHOT=docs/web-page.png stores a screenshot of it.
"""

# mypy: disable-error-code="unused-ignore, valid-type"

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.adapters import factors, peft_tensors, write_peft
from tests.e2e.serving import MODEL, Server, serve

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

KEY = "a-key-for-tests"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium is not installed")]
QUESTION = "Write a Python function that checks whether a word is a palindrome."
STORY = "Write a very long story about a river. Do not stop."
ANSWER = "#talk article:last-child .said"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapter = peft_tensors({"layers.0.self_attn.o_proj": factors((576, 576))})
    source = f"other={write_peft(tmp_path_factory.mktemp('adapter'), adapter)}@0.1"
    with serve("--draft-lora", source, environment={"SLIPSTREAM_API_KEY": KEY}) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--window-size=1280,860",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@dataclass
class Page:
    """The page as a user sees and uses it."""

    driver: Chrome
    server: Server

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def script(self, code: str) -> Any:
        return self.driver.execute_script(f"return {code}")

    def until(self, what: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (seen := what()):
            assert time.monotonic() < deadline, f"this never happened; the page shows: {self.find('body').text[-600:]}"
            time.sleep(0.01)
        return seen

    def type(self, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.find("#message").send_keys(text + Keys.ENTER)

    def busy(self) -> bool:
        return bool(self.script("document.body.classList.contains('busy')"))

    def text(self) -> str:
        return str(self.script(f"document.querySelector('{ANSWER}').textContent"))

    def ask(self, text: str) -> list[int]:
        """Sends a message and waits for its answer; returns the lengths of the text that were seen meanwhile."""
        self.type(text)
        lengths = [0]
        self.until(self.busy)
        while self.busy():
            lengths.append(len(self.text()))
            time.sleep(0.02)
        assert not self.all(".trouble"), self.find(".trouble").text
        return sorted(set(lengths))

    def number(self, name: str) -> float:
        return float(self.find(f"#{name}").text)

    def bars(self) -> list[float]:
        heights = self.script("[...document.querySelectorAll('#bars i')].map(bar => bar.style.height)")
        return [float(height.rstrip("%")) for height in heights]

    def set(self, **fields: str) -> None:
        """Writes into fields of the settings, as a user would."""
        self.find("#open-settings").click()
        for name, value in fields.items():
            field = self.find(f"#{name.replace('_', '-')}")
            field.clear()
            field.send_keys(value)
        self.find("#settings .close").click()

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        """The hosts from which the page has requested anything."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return {urlsplit(url).netloc for url in urls if urlsplit(url).scheme not in ("data", "blob")}


@pytest.fixture
def page(browser: Chrome, server: Server) -> Iterator[Page]:
    """A new page that has the key; at the end no error may be in its console."""
    browser.get(f"{server.url}/favicon.ico")
    browser.execute_script(f"sessionStorage.setItem('key', '{KEY}'); localStorage.clear()")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(server.url)
    opened = Page(browser, server)
    opened.until(lambda: opened.all("#model option"))
    yield opened
    assert opened.hosts() == {urlsplit(server.url).netloc}
    assert not opened.console()


def running(server: Server) -> int:
    slots = server.get("/slots", headers={"Authorization": f"Bearer {KEY}"})
    return sum(len(model["slots"]) + model["waiting"] for model in slots["models"])


def test_an_answer_streams_and_its_drafts_are_tinted(page: Page) -> None:
    assert [option.text for option in page.all("#model option")] == [MODEL]
    assert page.find("input[name=mode]:checked").get_attribute("value") == "auto"
    assert ".gguf" in page.find("#about").text
    lengths = page.ask(QUESTION)
    assert len(lengths) > 3, "the text came in one piece"
    assert len(page.all(f"{ANSWER} .drafted")) > 5
    assert page.number("tau") > 1 and page.number("speed") > 0
    assert page.bars()[0] > 50
    said = page.find("#talk .foot").text
    assert "tokens" in said and "of drafts accepted" in said and "auto" in said
    speculative = page.text()
    if path := os.environ.get("SLIPSTREAM_SCREENSHOT"):
        page.driver.save_screenshot(path)

    page.find("#fresh").click()
    page.find("input[value=plain]").click()
    page.ask(QUESTION)
    assert page.text() == speculative
    assert page.number("tau") == 1
    assert not page.all(f"{ANSWER} .drafted") and not any(page.bars())


def test_a_conversation_goes_on_and_shows_what_was_typed(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.set(max_tokens="24", system="You are a parrot.")
    page.find("#message").send_keys("<b>Polly</b>", Keys.SHIFT, Keys.ENTER)
    page.ask("wants a cracker")
    assert page.find(".from-user .said").text == "<b>Polly</b>\nwants a cracker" and not page.all("#talk b")
    for kind in ("chain", "tree"):
        page.find(f"input[value={kind}]").click()
        page.ask("Say it again.")
        assert f" · {kind}" in page.all("#talk .foot")[-1].text
    assert len(page.all(".from-user")) == len(page.all(".from-model")) == 3
    assert page.script("conversation.map(message => message.role).join()") == ",".join(["user", "assistant"] * 3)


def test_a_draft_variant_can_be_picked(page: Page) -> None:
    page.set(max_tokens="16")
    page.find("input[value=chain]").click()
    page.find("#open-settings").click()
    assert [option.get_attribute("value") for option in page.all("#variant option")] == ["", "base", "other"]
    page.find("#variant option[value=other]").click()
    page.find("#settings .close").click()
    page.ask(QUESTION)
    metrics = page.server.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert f'slipstream_drafted_steps_total{{draft_lora="other",model="{MODEL}"}}' in metrics


@pytest.mark.parametrize("by", ["button", "key"])
def test_stopping_frees_the_slot(page: Page, by: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page.set(max_tokens="2000")
    page.type(STORY)
    page.until(lambda: len(page.text()) > 20)
    assert running(page.server) == 1
    if by == "button":
        page.find("#go[aria-label=Stop]").click()
    else:
        page.find("body").send_keys(Keys.ESCAPE)
    page.until(lambda: running(page.server) == 0, 4.0)
    page.until(lambda: not page.busy())
    assert "stopped" in page.find("#talk .foot").text and page.text()


def test_the_server_s_refusal_is_shown_and_the_question_kept(page: Page) -> None:
    page.set(max_tokens="99999999")
    page.type(QUESTION)
    page.until(lambda: page.all(".trouble[role=alert]"))
    assert "max_tokens" in page.find(".trouble").text and "(400)" in page.find(".trouble").text
    page.until(lambda: not page.busy())
    assert page.find("#message").get_attribute("value") == QUESTION
    page.set(max_tokens="16")
    page.find("#go").click()
    page.until(lambda: page.all("#talk .foot .number"))
    assert all("400" in line for line in page.console())  # the browser itself logs a refused request


def test_a_key_is_asked_for_and_kept_for_this_tab_only(page: Page) -> None:
    page.script("sessionStorage.clear()")
    page.driver.refresh()
    page.until(lambda: "API key is missing" in page.find("#notice").text)
    assert page.console() and not page.all("#model option")
    page.set(key=KEY)
    page.until(lambda: page.all("#model option"))
    page.until(lambda: not page.find("#notice").is_displayed())
    assert page.script("sessionStorage.getItem('key')") == KEY
    assert page.script("JSON.stringify(localStorage) + document.cookie") == "{}"


def test_dark_and_light_follow_the_system_and_the_button(page: Page) -> None:
    def system(theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def brightness() -> int:
        colour = page.script("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.strip("rgb()").split(","))

    try:
        system("light")
        page.until(lambda: brightness() > 600)
        system("dark")
        page.until(lambda: brightness() < 150)
        page.find("#theme").click()
        assert brightness() > 600
        page.driver.refresh()
        assert brightness() > 600, "the chosen theme was forgotten"
    finally:
        system("")


def test_it_fits_a_small_phone(page: Page) -> None:
    size = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.set(max_tokens="48")
        page.ask(QUESTION)
        assert page.script("document.documentElement.scrollWidth") == 360
        for selector in ("#model", "#modes", "#go", "#fresh", "#theme", "#tau", "#bars"):
            box = page.find(selector).rect
            assert box["width"] > 20 and box["x"] >= 0 and box["x"] + box["width"] <= 360, selector
            assert box["height"] > 10 and box["y"] >= 0 and box["y"] + box["height"] <= 640, selector
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_reasoning_is_folded_away_and_is_only_text(page: Page) -> None:
    page.driver.execute_script("new AnswerView().thinking('<i>hm</i>')")
    thoughts = page.find(".thoughts")
    assert thoughts.get_attribute("open") is None and not page.find(".thoughts div").is_displayed()
    thoughts.find_element("css selector", "summary").click()
    assert page.find(".thoughts div").is_displayed() and page.find(".thoughts div").text == "<i>hm</i>"


def test_everything_to_press_has_a_name(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter(node =>
        !node.textContent.trim() && !node.getAttribute('aria-label') && !node.labels?.length
    ).map(node => node.outerHTML)"""
    assert page.script(unnamed) == []


def test_without_a_drafter_the_page_offers_plain_and_auto_and_counts_what_the_text_brought(browser: Chrome) -> None:
    with serve("--draft", "suffix") as running_server:
        browser.get(running_server.url)
        page = Page(browser, running_server)
        page.until(lambda: page.all("#model option"))
        page.until(lambda: "drafts from its own text" in page.find("#about").get_attribute("textContent"))
        inputs = page.all("input[name=mode]")
        assert {one.get_attribute("value"): one.is_enabled() for one in inputs} == {
            "plain": True,
            "chain": False,
            "tree": False,
            "auto": True,
        }
        assert page.script("document.querySelector('input[name=mode]:checked').value") == "auto"
        page.ask("Repeat this line five times: three red apples, two green pears and a basket of ripe plums.")
        assert "found in the text" in page.find("#accepted").text
        assert not page.console()
