"""The page in a browser: text with probabilities, a stop, the newest checkpoint."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.extras.serving.browser import opened
from tests.extras.serving.conftest import Server
from tests.support.tiny_runs import step_of

pytestmark = pytest.mark.dist


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    with opened(server.url, allowed="400 (Bad Request)") as page:
        yield page


def test_text_streams_with_probabilities(page: Page, server: Server) -> None:
    expect(page).to_have_title("one, step 6")
    expect(page.locator("#path")).to_contain_text("step_00000006")
    page.get_by_label("Prompt").fill("def ")
    page.get_by_label("Tokens").fill("8")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Generate").click()
    state = page.get_by_role("status")
    expect(state).to_contain_text("8 tokens, ")
    expect(state).to_contain_text("length")
    tokens = page.locator("#text span")
    expect(tokens).to_have_count(8)
    shares = [float(s) for s in tokens.evaluate_all("all => all.map(s => s.dataset.probability)")]
    assert all(0 < share <= 1 for share in shares)
    tokens.first.hover()
    expect(page.locator("#alternatives")).to_contain_text("chosen")
    lines = page.locator("#alternatives").inner_text().splitlines()
    assert len(lines) >= 3 and lines[0].strip().startswith(f"{100 * shares[0]:.1f} %")
    # The same text by the keyboard, as a chat too.
    text = page.locator("#text").inner_text()
    page.get_by_label("Prompt").press("Control+Enter")
    expect(state).to_contain_text("length")
    assert page.locator("#text").inner_text() == text
    page.get_by_label("as a chat").check()
    page.get_by_role("button", name="Generate").click()
    expect(tokens).to_have_count(8)
    expect(state).to_contain_text("length")
    assert not page.get_by_role("alert").inner_text()


def test_mistakes_are_shown(page: Page) -> None:
    page.get_by_label("Prompt").fill("x" * 50)
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("the prompt has 51 tokens, the context 32")
    page.get_by_label("Prompt").fill("<b>x</b>")
    page.get_by_label("Tokens").fill("2")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("status")).to_contain_text("length")
    expect(page.get_by_role("alert")).to_be_empty()


def test_the_button_loads_the_newest_checkpoint(page: Page, server: Server) -> None:
    button, state = page.get_by_role("button", name="Newest"), page.get_by_role("status")
    button.click()
    expect(state).to_have_text("step 6 is the newest")
    shutil.copytree(server.later, step_of(server.run, 12))
    try:
        button.click()
        expect(state).to_have_text("step 12 in place of 6", timeout=60_000)
        expect(page).to_have_title("one, step 12")
    finally:
        shutil.rmtree(step_of(server.run, 12))
        button.click()
        expect(page).to_have_title("one, step 6", timeout=60_000)
