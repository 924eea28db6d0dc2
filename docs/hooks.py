"""Pages of the site that lie outside of docs/, and links between the two."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site -> file of the repository.
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results/cpu.md": "benchmarks/results/cpu.md",
    "results/cpu_xeon.md": "benchmarks/results/cpu_xeon.md",
    "results/h200.md": "benchmarks/results/h200.md",
    "results/h200_decode.md": "benchmarks/results/h200_decode.md",
    "results/h200_prefill.md": "benchmarks/results/h200_prefill.md",
    "results/h200_shared_prefix.md": "benchmarks/results/h200_shared_prefix.md",
    "results/h200_capacity.md": "benchmarks/results/h200_capacity.md",
    "results/reliability.md": "reliability/results/cpu.md",
    "results/reliability_h200.md": "reliability/results/h200.md",
}
ROLE = re.compile(r":(?:class|func|meth):(?=<code>)")  # of docstrings, which mkdocstrings takes for text
LINK = re.compile(r"\]\(([^)\s:#]+\.md)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, as if they lay in docs/."""
    for page, path in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let a link that leads to a file of the repository lead to its page."""
    source = page.file.src_uri
    place = PAGES.get(source, f"docs/{source}")  # where the text stands in the repository
    pages = {path: site_page for site_page, path in PAGES.items()}

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link[1]))
        site_page = pages.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(site_page, posixpath.dirname(source) or '.')}"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Leave the names of docstrings' cross-references, without what another tool reads before them."""
    return ROLE.sub("", html)
