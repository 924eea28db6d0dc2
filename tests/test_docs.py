"""The documentation: every page is in the navigation, links lead somewhere, messages exist, the site builds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import yaml
from test_checks import CASES, DEBUG_CASES
from test_package import output

import torch_paged_kv

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "torch_paged_kv"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ENTRY = re.compile(r"^### `(.*)`$", re.MULTILINE)


def configuration() -> dict[str, Any]:
    """mkdocs.yml."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return settings


def navigation(entries: Any) -> list[str]:
    """Pages of the navigation, in order."""
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for value in values for page in navigation(value)]


def anchors(page: Path) -> set[str]:
    """What a link may name after its #."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_page_is_in_the_navigation_once() -> None:
    in_navigation = navigation(configuration()["nav"])
    assert len(in_navigation) == len(set(in_navigation))
    from_elsewhere = re.findall(r'"([\w/]+\.md)": "([\w/]+\.md)"', (DOCS / "hooks.py").read_text())
    assert all((ROOT / path).is_file() for _, path in from_elsewhere)
    expected = {page.relative_to(DOCS).as_posix() for page in PAGES} | {page for page, _ in from_elsewhere}
    assert set(in_navigation) == expected


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


# ---- messages -------------------------------------------------------------------------------------------------------


def messages(tree: ast.AST, raised: set[str]) -> list[str]:
    """Texts given to the errors or functions of these names, with … for what is filled in."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in raised:
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            words = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
            found.append("".join(map(str, words)))
    return found


@functools.cache
def sources() -> str:
    """Every string literal of the package and of C++ and CUDA sources, neighbours joined."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        texts.append(" ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text())))
    return "\n".join(texts)


def entries() -> list[str]:
    """Messages that the page on troubleshooting explains."""
    return ENTRY.findall((DOCS / "troubleshooting.md").read_text())


@pytest.mark.parametrize("entry", entries())
def test_explained_message_exists(entry: str) -> None:
    """Its fixed parts are in the sources; in C++ one function puts "must" and "got" between them."""
    texts = sources()
    for part in re.split(r"…|(?:^|(?<= ))must |, got", entry):
        words = part.strip(" ,:.=")
        assert not words or words in texts, words


OP_MESSAGES = sorted({text for cases in (CASES, DEBUG_CASES) for rules in cases.values() for _, text in rules})


def test_every_rule_about_arguments_is_explained() -> None:
    """All messages of the ops' checks, debug mode's included, match an entry."""
    patterns = [re.compile(re.escape(entry).replace("…", ".*") + ".*") for entry in entries()]
    assert len(OP_MESSAGES) > 100
    assert [text for text in OP_MESSAGES if not any(pattern.fullmatch(text) for pattern in patterns)] == []


def test_errors_without_an_argument_are_explained() -> None:
    """Errors that name no argument are the hard ones: all of them, and all warnings, are on the page."""
    page = "\n".join(entries())
    unexplained = []
    for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("integrations/*.py")]:
        if path.stem in ("_texts", "demo", "commands", "quality"):
            continue
        for message in messages(ast.parse(path.read_text()), {"RuntimeError", "ImportError", "warnings.warn"}):
            parts = [part.strip(" ,:.=") for part in message.split("…")]
            if not all(part in page for part in parts):
                unexplained.append(f"{path.stem}: {message}")
    assert unexplained == []


# ---- the site -------------------------------------------------------------------------------------------------------


def test_pictures_show_what_the_code_does(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "pictures" / "draw.py"))["main"](tmp_path)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 3
    for picture in drawn:
        assert picture.read_text() == (DOCS / "pictures" / picture.name).read_text(), picture.name


def test_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: torch_paged_kv\.(.+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    names = {name.rsplit(".", 1)[-1] for name in listed}
    assert set(torch_paged_kv.__all__) - names == {"__version__", "ops", "reference"}
    for name in torch_paged_kv.ops.__all__:
        assert f"ops.{name}" in listed


class Links(HTMLParser):
    """What a page of the site can be reached by, and what it leads to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for attribute, value in attrs:
            if attribute == "id":
                self.names.add(value or "")
            elif attribute in ("href", "src") and value and not re.match(r"[a-z]+:|//", value):
                self.targets.append(value)


def broken_links(site: Path) -> list[str]:
    """Links of the finished pages that lead to no file or no anchor, generated ones and pictures included."""
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, links in pages.items():
        for link in links.targets:
            path, anchor = urldefrag(link)
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            names = pages[target].names if target in pages else set()
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in names):
                broken.append(f"{page.relative_to(site.resolve())}: {link}")
    return broken


def test_link_check_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="here">A</h1><a href="../#there">x</a><img src="none.svg">')
    (tmp_path / "index.html").write_text('<a href="a/#here">x</a><a href="a/#gone">x</a><a href="https://b/c">x</a>')
    expected = ["a/index.html: ../#there", "a/index.html: none.svg", "index.html: a/#gone"]
    assert sorted(broken_links(tmp_path)) == expected


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the docs extra is not installed")
def test_site_builds_strictly(tmp_path: Path) -> None:
    # Not quietly: what is not logged is not counted as a warning.
    output(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    assert (tmp_path / "site" / "index.html").is_file()
    assert broken_links(tmp_path / "site") == []
    assert "PagedKVCache" in (tmp_path / "site" / "api" / "index.html").read_text()
