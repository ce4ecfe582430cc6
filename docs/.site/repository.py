"""MkDocs hook: the repository's own pages, and links from any page to any file of the repository.

The Markdown files link to each other as they lie in the repository, so that a reader of a clone can follow the links.
In the site, docs/ is the root, and what lies elsewhere goes to repository/: other Markdown files as pages, other files
that are linked to as they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")
ELSEWHERE = "repository/"

#: ](target#anchor), outside of code.
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in PAGES:
        add(page, files, config)
    for file in list(files.documentation_pages()):
        source = in_repository(file.src_uri)
        for target, _ in links((ROOT / source).read_text()):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            if (ROOT / path).is_file() and files.get_file_from_path(in_site(path)) is None:
                add(path, files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = in_repository(page.file.src_uri)
    here = posixpath.dirname(source)

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        return posixpath.relpath(in_site(path), posixpath.dirname(page.file.src_uri)) + (link[2] or "")

    return outside_code(markdown, lambda text: _LINK.sub(moved, text))


def add(path: str, files: Files, config: MkDocsConfig) -> None:
    uri = in_site(path)
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))


def in_site(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    return path.removeprefix("docs/") if path.startswith("docs/") else ELSEWHERE + path


def in_repository(uri: str) -> str:
    return uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else "docs/" + uri


def links(markdown: str) -> list[tuple[str, str]]:
    """(file, "#anchor" or "") of each relative link."""
    found: list[tuple[str, str]] = []
    outside_code(markdown, lambda text: found.extend(_LINK.findall(text)) or text)
    return found


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
