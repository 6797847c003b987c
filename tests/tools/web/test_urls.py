"""URLs in texts, and the domains that they lie in."""

from __future__ import annotations

import time

import pytest

from tools import host_of, is_within, urls_in
from tools.web.urls import key


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("See https://example.org/a?b=c#d.", "https://example.org/a?b=c"),
        ("(at example.org/a)", "http://example.org/a"),
        ("[this](https://example.org/a_(b))", "https://example.org/a_(b)"),
        ("Go to Example.ORG!", "https://example.org/"),
        ("http://127.0.0.1:8080/x, or so", "http://127.0.0.1:8080/x"),
        ("<https://example.org/a>", "https://EXAMPLE.org/a"),
        ("siehe http://bücher.example/ü", "http://bücher.example/ü"),
    ],
)
def test_a_url_in_a_text_is_found(text: str, url: str) -> None:
    assert key(url) in urls_in(text)


@pytest.mark.parametrize(
    "text", ["http://a.example/" + "." * 100_000, "x" * 100_000, "a." * 50_000, "https://" * 20_000]
)
def test_a_long_text_is_read_at_once(text: str) -> None:
    began = time.process_time()
    found = urls_in(f"{text} b.example/c")
    assert time.process_time() - began < 2
    assert key("https://b.example/c") in found
    assert len(found) < 100 and sum(map(len, found)) < 1_000_000


@pytest.mark.parametrize(
    "url",
    ["https://example.org/a?q=secret", "https://example.org/ab", "https://a.example.org/a", "https://org/a"],
)
def test_another_url_is_not(url: str) -> None:
    assert key(url) not in urls_in("See https://example.org/a and example.org/a?q= too.")


@pytest.mark.parametrize(
    ("url", "domains", "within"),
    [
        ("https://a.example.org/x", ["example.org"], True),
        ("https://example.org:8443/x", ["https://Example.org/"], True),
        ("https://notexample.org/", ["example.org"], False),
        ("https://example.org.evil.example/", ["example.org"], False),
        ("https://evil.example/?example.org", ["example.org"], False),
        ("https://example.org@evil.example/", ["example.org"], False),
        ("https://evil.example/", [], True),
        ("nonsense", ["example.org"], False),
        ("http://[", ["example.org"], False),
    ],
)
def test_a_url_lies_in_a_domain_by_its_host(url: str, domains: list[str], within: bool) -> None:
    assert is_within(url, domains) is within


@pytest.mark.parametrize(
    ("url", "domains", "within"),
    [
        ("https://example.org/x", [], True),
        ("https://bad.example/x", [], False),
        ("https://a.bad.example:8080/x", [], False),
        ("https://notbad.example/x", [], True),
        ("https://bad.example/x", ["example"], False),
        ("https://good.example/x", ["example"], True),
        ("https://bad.example./x", [], False),
        ("https://BAD。example/x", [], False),
        ("https://bad.example:81/x", [], False),
    ],
)
def test_a_blocked_domain_is_within_none(url: str, domains: list[str], within: bool) -> None:
    assert is_within(url, domains, ["bad.example"]) is within


@pytest.mark.parametrize("blocked", ["münchen.example", "xn--mnchen-3ya.example", "MÜNCHEN.example."])
def test_a_name_is_the_same_in_both_its_forms(blocked: str) -> None:
    for url in ("https://münchen.example/x", "https://www.xn--mnchen-3ya.example/x"):
        assert not is_within(url, [], [blocked])
        assert is_within(url, [blocked])


def test_a_host_has_its_port() -> None:
    assert host_of("https://A.example:81/x") == "a.example:81"
    assert host_of("https://a.example/") == "a.example"
