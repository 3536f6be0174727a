# SPDX-License-Identifier: Apache-2.0
"""The status page in Chromium, as an operator sees it on a desktop and on a phone, without reloading it."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_standin import DecodeEngine, Servers
from proxy_cluster import COMPLETION, STREAM, Cluster, eventually, running_cluster
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
)
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
DESK = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
METRICS = """vllm:num_requests_running{engine="0"} 5
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{num_gpu_blocks="100",block_size="128"} 1
vllm:kv_pd_verified_total{engine="0",rank="0/0",result="wrong"} 2
"""
# Text of an engine or a client that does harm where it gets into a page as HTML.
MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


class Page:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, cluster: Cluster) -> None:
        self.driver.get(str(cluster.client.base_url))

    def size(self, size: dict[str, Any], scheme: str = "light") -> None:
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def text(self, selector: str = "body") -> str:
        """Returns the visible text."""
        seen = "(e => e?.checkVisibility() ? e.innerText.trim() : '')(document.querySelector(arguments[0]))"
        return self.run(seen, selector)

    def engine(self, url: str) -> dict[str, str]:
        """Returns a row of an engine's table, by column title."""
        script = """(([...document.querySelectorAll('.engines tbody tr')]
            .filter(row => row.querySelector('.url').textContent === arguments[0])
            .map(row => { const titles = row.closest('table').tHead.rows[0].cells;
                return Object.fromEntries([...row.cells].filter(cell => !cell.hidden)
                    .map(cell => [titles[cell.cellIndex].textContent, cell.innerText.trim()])); }))[0] ?? {})"""
        return self.run(script, url)

    def phase(self, name: str) -> str:
        return self.text(f"[data-phase={name}]")

    def errors(self) -> list[dict[str, Any]]:
        """Returns the browser's errors, including violations of the page's content policy."""
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    chromium, chromedriver = (shutil.which(program, path=path) for program in ("chromium", "chromedriver"))
    if chromium is None or chromedriver is None:
        pytest.skip("scripts/setup_env.sh --with-programs, on Debian, unpacks Chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    home = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS, f"--user-data-dir={home / 'data'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The service's path: selenium would look for a driver on the network.
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    driver = webdriver.Chrome(options=options, service=Service(chromedriver, env=environment))
    try:
        driver.set_page_load_timeout(30)
        driver.set_script_timeout(30)
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser: webdriver.Chrome) -> Iterator[Page]:
    page = Page(browser)
    page.size(DESK)
    page.errors()  # those of the test before
    yield page
    browser.get("about:blank")


def test_the_page_follows_start_load_and_failure_without_a_reload(page: Page) -> None:
    with running_cluster(attempts=1, max_per_decode=4, check_interval=0.2) as cluster:
        cluster.decode.metrics = METRICS
        cluster.prefill.transfer_error = f"no grant in time {MARKUP}"
        page.open(cluster)
        page.run("window.loadedOnce = true")
        eventually(lambda: "All engines are well" in page.text("#verdict"))
        assert page.text("h1") == "Proxy status"
        assert [page.text(f"#{role}-title") for role in ("prefill", "decode")] == ["Prefill engines", "Decode engines"]
        assert "None since the proxy started" in page.text("#no-failures")
        eventually(lambda: page.engine(cluster.decode_url)["Running"] == "5")
        row = page.engine(cluster.decode_url)
        assert (row["Health"], row["Waiting"], row["KV cache"]) == ("healthy", "2", "25% of 12.8K tokens")
        assert (row["In flight"], row["Places"]) == ("0", "0 of 4")
        assert "verify_kv has found wrong KV 2 times" in page.text("#roles")
        assert page.engine(cluster.prefill_url)["Running"] == "–", "it does not say"

        cluster.prefill.holds = True
        connections = [cluster.send_only("/v1/completions", {**COMPLETION, **STREAM}) for _ in range(3)]
        eventually(lambda: page.phase("prefill") == "3")
        assert page.text("#in-flight") == "3"
        row = page.engine(cluster.decode_url)
        assert (row["In flight"], row["Places"]) == ("3", "3 of 4")
        assert page.engine(cluster.prefill_url)["In flight"] == "3"
        cluster.prefill.holds = False
        for connection in connections:
            connection.getresponse().read()
            connection.close()
        eventually(lambda: page.phase("prefill") == page.text("#in-flight") == "0")

        eventually(lambda: "no grant in time" in page.text("#failures"))
        newest = page.text("#failures li")
        assert f"decode: no prefill engine {cluster.decode_url}" in newest
        assert MARKUP in newest, "as text"
        assert "s ago" in newest
        assert "prefill: transfer failed" in page.text("#failures")
        assert page.run("window.loadedOnce"), "the page was loaded again"
        assert page.driver.title.startswith("Proxy status")
        assert page.errors() == []


def test_engine_that_dies_and_one_that_comes_back(page: Page) -> None:
    with ExitStack() as running:
        dying = running.enter_context(Servers())
        url = dying.start(lambda _: DecodeEngine().app)
        cluster = running.enter_context(running_cluster(check_interval=0.1, other_decode=(url,)))
        page.open(cluster)
        eventually(lambda: page.engine(url).get("Health") == "healthy")
        dying.__exit__(None, None, None)
        eventually(lambda: page.engine(url)["Health"] == "ejected")
        assert "ConnectError" in page.engine(url)["Engine"]
        assert page.text("#verdict") == "Some engines are not well"
        assert page.engine(cluster.decode_url)["Health"] == "healthy"
        cluster.decode.healthy = False
        eventually(lambda: page.engine(cluster.decode_url)["Engine"].endswith("HTTP 503"))
        eventually(lambda: page.text("#verdict") == "Requests cannot be served")
        cluster.decode.healthy = True
        eventually(lambda: page.engine(cluster.decode_url)["Health"] == "healthy")
        assert "HTTP 503" not in page.engine(cluster.decode_url)["Engine"]
        assert page.errors() == []


def test_the_page_says_that_the_proxy_has_gone(page: Page) -> None:
    with running_cluster() as cluster:
        page.open(cluster)
        eventually(lambda: page.text("#verdict") == "All engines are well")
    eventually(lambda: "No news of the proxy" in page.text("#unreachable"))
    assert page.text("#prefill-title"), "what was known last stays"


def test_the_page_asks_for_the_token_and_does_not_store_it(page: Page, token_file: str) -> None:
    with running_cluster(admin_token_file=token_file) as cluster:
        page.open(cluster)
        eventually(lambda: page.text("#sign-in h2") == "Admin token")
        assert page.text("main") == ""

        def enter(token: str) -> None:
            page.driver.find_element(By.ID, "token").send_keys(token)
            page.driver.find_element(By.CSS_SELECTOR, "#sign-in button").click()

        enter("another")
        eventually(lambda: "does not accept" in page.text("#refused"))
        enter("a-secret")
        eventually(lambda: page.engine(cluster.decode_url).get("Health") == "healthy")
        assert page.text("#sign-in") == ""
        kept = page.run("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
        assert "a-secret" not in kept
        page.driver.refresh()
        eventually(lambda: page.text("#sign-in h2") == "Admin token")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_page_fits_the_screen_and_its_text_has_enough_contrast(
    page: Page, size: dict[str, Any], scheme: str
) -> None:
    nobody = "http://[0000:0000:0000:0000:0000:0000:0000:0001]:9"
    with running_cluster(
        attempts=1, max_per_decode=8, max_per_prefill=8, check_interval=0.2, other_prefill=(nobody,)
    ) as cluster:
        cluster.prefill.metrics = cluster.decode.metrics = METRICS
        cluster.prefill.transfer_error = "x" * 280
        cluster.complete()
        page.size(size, scheme)
        page.open(cluster)
        eventually(lambda: "xxx" in page.text("#failures") and page.engine(nobody)["Health"] == "ejected")
        assert page.run("document.documentElement.scrollWidth") <= size["width"]
        outside = """[...document.querySelectorAll('main *')].filter(e => e.offsetParent && !e.closest('thead')
            && e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML)"""
        assert page.run(outside) == []
        assert page.run(CONTRASTS) == []
        assert page.errors() == []


# Texts whose contrast is below what WCAG 2 asks for at level AA.
CONTRASTS = """(() => {
    const parse = color => color.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const back = element => { const color = parse(getComputedStyle(element).backgroundColor);
        return color[3] === 0 && element.parentElement ? back(element.parentElement) : color; };
    const found = [];
    for (const element of document.body.querySelectorAll('*')) {
        const says = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!says || !element.offsetParent || element.closest('noscript')) continue;
        const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(back(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push([element.textContent.trim(), ratio]);
    }
    return found;
})()"""


def test_screen_reader_finds_tables_and_headings(cluster: Cluster, page: Page) -> None:
    """On a phone, too, where tables do not look like tables."""
    page.size(PHONE)
    page.open(cluster)
    eventually(lambda: page.engine(cluster.decode_url).get("Health") == "healthy")
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = Counter((node["role"]["value"], node["name"]["value"]) for node in nodes if not node["ignored"])
    titles = "Requests", "Prefill engines", "Decode engines", "Recent failures"
    assert {name for role, name in named if role == "heading"} == {"Proxy status", *titles}
    assert {name for role, name in named if role == "table"} == set(titles[1:3])
    assert named["columnheader", "Health"] == 2
    assert named["rowheader", cluster.prefill_url] == named["rowheader", cluster.decode_url] == 1
    assert named["cell", "healthy"] == 2
    assert named["status", ""] == 1
    assert page.text("#verdict[role=status]") == "All engines are well"
