# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: what the site shows beside docs/.

README.md and its sisters become pages, and so do the public headers (scripts/api_pages.py). A link that leaves docs/ goes to such a
page, or becomes plain text where the site has none; a link to a file that does not exist fails the build. A <picture> with a dark
variant follows the site's own switch between light and dark.
"""

import pathlib
import posixpath
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
API = ROOT / "build-site/api"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
         "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
PICTURE = re.compile(r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
                     r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>')


def on_config(config):
    """A folder in the navigation stands for its pages, its index first."""
    def pages(folder):
        where = API if folder == "api/" else pathlib.Path(config.docs_dir) / folder
        names = [path.name for path in sorted(where.glob("*.md"), key=lambda p: (p.name not in ("index.md", "README.md"), p.name))]
        return [folder + name for name in names]

    def expand(items):
        for item in items:
            for title, value in item.items():
                if isinstance(value, list):
                    expand(value)
                elif value.endswith("/"):
                    item[title] = pages(value)

    expand(config.nav)
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted(API.glob("*.md")):
        files.append(File.generated(config, f"api/{path.name}", content=path.read_text(encoding="utf-8")))
    return files


def repository_path(page, target):
    """The path from the repository's root of what a page links to."""
    source = next((name for name, uri in PAGES.items() if uri == page), None)
    folder = "" if source else posixpath.dirname(posixpath.join("docs", page))
    return posixpath.normpath(posixpath.join(folder, target))


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if uri.startswith("api/"):
        return markdown

    def local(target):
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    def link(match):
        words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        path, anchor = re.fullmatch(r"([^#]*)(#.*)?", target).groups()
        path = repository_path(uri, path)
        if not (ROOT / path).exists():
            raise PluginError(f"{uri} links to {target}, which does not exist")
        if path in PAGES:
            return f"[{words}]({local(PAGES[path])}{anchor or ''})"
        if path.startswith("docs/"):
            return f"[{words}]({local(path[len('docs/'):])}{anchor or ''})"
        header = API / f"{pathlib.Path(path).stem}.md"
        if path.startswith("include/") and header.exists():
            return f"[{words}]({local('api/' + header.name)})"
        return words if "`" in words else f"`{words}`" if "/" in words or "." in words else words

    def picture(match):
        dark, words, light = match.groups()
        folder = "docs/" if uri in PAGES.values() else ""
        return "\n".join(f"![{words}]({image.removeprefix(folder)}#only-{kind})"
                         for image, kind in ((light, "light"), (dark, "dark")))

    parts = re.split(r"(^```.*?^```\n)", PICTURE.sub(picture, markdown), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)
