"""Checks the links to other sites; exits with 1 and names each one that does not answer. Needs the network."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20


def main() -> int:
    places = defaultdict(set)
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")):
        for link in links(page.read_text()):
            places[link].add(str(page.relative_to(ROOT)))
    with ThreadPoolExecutor(8) as pool:
        problems = dict(zip(places, pool.map(problem, places), strict=True))
    for link, found in problems.items():
        if found:
            print(f"{link}: {found} (in {', '.join(sorted(places[link]))})")
    print(f"{len(places)} links, {sum(map(bool, problems.values()))} of them broken")
    return int(any(problems.values()))


def links(markdown: str) -> Iterator[str]:
    for token in MarkdownIt("commonmark").parse(markdown):
        for child in token.children or ():
            target = str(child.attrs.get("href", ""))
            if target.startswith(("http://", "https://")):
                yield target.partition("#")[0]


def problem(link: str) -> str:
    """Why the link does not lead anywhere; "" when it does."""
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
