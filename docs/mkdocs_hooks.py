"""What the site of the docs does beyond mkdocs: formulas become MathML, and files of the repository that pages link to
become pages of it.

On GitHub a page may link to any file of the repository. The site has only the folder docs. So README.md is its first
page, the other pages of the root keep their names, and a source file that some page links to is a page below `source/`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mi>&#x02032;</mi></msup>")  # in an index it would lower the whole index
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".json": "json", ".cff": "yaml", ".toml": "toml", ".yml": "yaml"}


def math(source: str, *_: Any, **__: Any) -> str:
    """Return the MathML of a block ```math."""
    formula = PRIME.sub(r'\1<mo lspace="0" rspace="0">&#x02032;</mo>', convert(source, display="block"))
    return f'<div class="math">{formula}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files that pages link to, and those that these link to."""
    todo = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        name = str(path.relative_to(ROOT))
        if not name.startswith("docs/"):
            files.append(File.generated(config, _address(name), content=_content(path)))
        if path.suffix in (".md", ".ipynb"):
            todo += [
                file for target in LINK.findall(_text(path)) if (file := (path.parent / target).resolve()).exists()
            ]
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to where the site has the files."""
    here = page.file.src_uri
    if here.startswith("source/"):
        name = here.removeprefix("source/").removesuffix(".md")
    else:
        name = _names().get(here, f"docs/{here}")
    folder = PurePosixPath(name).parent

    def there(found: re.Match[str]) -> str:
        target = normpath(folder / found[1])
        if not (ROOT / target).exists():
            return found[1]  # which mkdocs refuses
        return relpath(_address(target), PurePosixPath(here).parent)

    pieces = re.split(f"({FENCE.pattern})", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(piece if FENCE.fullmatch(piece) else LINK.sub(there, piece) for piece in pieces)


def _address(name: str) -> str:
    """Where the site has a file of the repository."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if "/" not in name and name.endswith(".md") else f"source/{name}.md"


@cache
def _names() -> dict[str, str]:
    """The pages of the root, by their address."""
    return {_address(path.name): path.name for path in ROOT.glob("*.md")}


def _text(path: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", _content(path))


def _content(path: Path) -> str:
    """What the site shows of a file or a folder."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    if path.suffix == ".ipynb":
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"])
        return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)
    if path.is_dir():
        shown, language = "\n".join(sorted(file.name for file in path.iterdir() if file.suffix)), "text"
    else:
        shown, language = path.read_text(encoding="utf-8").rstrip(), LANGUAGES.get(path.suffix, "text")
    return f"# `{name}`\n\n````{language}\n{shown}\n````\n"
