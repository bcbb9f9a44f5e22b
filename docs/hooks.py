"""Hooks of MkDocs: what pages hold that Markdown has not.

Files outside docs/ that pages link to become pages, so that links work on the site too. Figures get their dark form and
lead to the whole of themselves. Formulas become MathML, which browsers typeset without a script. Long names may break.
"""

# pyright: reportMissingImports=false
# MkDocs comes with the extra "docs" only.
from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FIGURE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]*figures/[^)\s#]+)\.svg\)")
FORMULA = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "bash", ".cpp": "cpp", ".h": "cpp"}
MADE = re.compile(r"^Made from the docstrings by .*\n", re.MULTILINE)  # for those who read the source of the page
LONG_NAME = re.compile(r"<code>([^<\s]{25,})</code>")
JOINT = re.compile(r"(::|(?<!<)/|_)(?=\w)")  # but the slash of an end tag
SHOWN_BYTES = 200_000  # of a file that is no Markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to, and for what those link to in turn."""
    todo = [(_place(file), file.content_string) for file in files.documentation_pages()]
    known: set[str] = set()
    while todo:
        place, text = todo.pop()
        for target in sorted(_targets(place, text) - known):
            known.add(target)
            content = _content(target)
            files.append(File.generated(config, _uri(target), content=content))
            if target.endswith(".md"):
                todo.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to the pages made above, draw formulas, leave out what is for readers of the source only."""
    place = _place(page.file)
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # its column would hold one word; the tabs lead on
    if place.endswith(".json"):
        page.meta["search"] = {"exclude": True}  # thousands of numbers
    elif page.file.src_uri.startswith("source/"):
        page.meta["search"] = {"boost": 0.5}
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 2}  # who types a name looks for its description
        markdown = MADE.sub("", markdown)
    here = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = _target(place, match[1])
        if target is None:
            return match[0]
        uri = target.removeprefix("docs/") if target.startswith("docs/") else _uri(target)
        return f"]({posixpath.relpath(uri, here or '.')}{match[2] or ''})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _drawn(LINK.sub(replace, part)) for part in parts)


def on_page_content(html: str, **_: Any) -> str:
    """Let long names, such as those of tests, break at their joints: a column is as wide as its longest word."""
    return LONG_NAME.sub(lambda match: JOINT.sub(r"\1<wbr>", match[0]), html)


def _drawn(markdown: str) -> str:
    """Figures in both forms, of which the page shows one, and formulas."""
    both = r"[![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)](\2.svg){ .figure }"
    markdown = FIGURE.sub(both, markdown)
    return FORMULA.sub(lambda match: _typeset(match[1]), markdown)


def _typeset(formula: str) -> str:
    """Return MathML. What `\\qquad` sets apart stands in one line where there is room, else below one another."""
    parts = [convert(part, display="block") for part in re.split(r"\s*\\qquad\s*", formula)]
    return f'<div class="formula">{"".join(parts)}</div>'


def _place(file: File) -> str:
    """Where a page comes from, from the root of the repository."""
    if file.src_uri.startswith("source/"):
        original = file.src_uri.removeprefix("source/")
        return original if (ROOT / original).exists() else original.removesuffix(".md")
    return f"docs/{file.src_uri}"


def _targets(place: str, text: str) -> set[str]:
    found = {_target(place, match[1]) for match in LINK.finditer(FENCE.sub("", text))}
    return {target for target in found if target is not None and not target.startswith("docs/")}


def _target(place: str, link: str) -> str | None:
    """Where a link leads, from the root of the repository; None for what is no file of it."""
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _uri(target: str) -> str:
    return f"source/{target}" if target.endswith(".md") else f"source/{target}.md"


def _content(target: str) -> str:
    path = ROOT / target
    if not path.is_file() or not path.is_relative_to(ROOT):
        raise FileNotFoundError(f"a page links to {target}, which is no file of the repository")
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if len(text) > SHOWN_BYTES:
        return f"# {target}\n\n{len(text)} bytes of text; see the file in the repository.\n"
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
