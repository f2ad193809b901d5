#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pages of the public headers: what Doxygen finds in each, with the comment above it.

    scripts/api_pages.py FOLDER        writes FOLDER/index.md and a page a header

A page gives the header's own comment, and then each function, type and constant in the order of the file: the comment as
text, the declaration as it stands. Functions and constants without a comment belong to what is before them.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include/fa2"
SETTINGS = """
INPUT = {include}
RECURSIVE = YES
EXTRACT_ALL = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
OUTPUT_DIRECTORY = {out}
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = FA2_EXPORT=
EXCLUDE_PATTERNS = */export.h
QUIET = YES
WARN_AS_ERROR = YES
"""


def entities(xml):
    """{header: [(first line, last line, name)]} of what stands outside of any class."""
    found = {}
    seen_types = set()
    for compound in ElementTree.parse(xml / "index.xml").getroot().iter("compound"):
        kind = compound.get("kind")
        if kind not in ("file", "namespace", "struct", "class"):
            continue
        definition = ElementTree.parse(xml / f"{compound.get('refid')}.xml").getroot().find("compounddef")
        if kind in ("struct", "class"):
            name = definition.find("compoundname").text
            where = definition.find("location")
            if name.count("::") > 1 or where is None or where.get("bodystart") is None or "@" in name:
                continue
            short = name.split("::")[-1]
            seen_types.add(short)
            found.setdefault(where.get("file"), []).append(
                (int(where.get("bodystart")), int(where.get("bodyend")), short))
            continue
        for member in definition.iter("memberdef"):
            where = member.find("location")
            if member.get("kind") == "define" or where is None:
                continue
            first = int(where.get("bodystart") or where.get("line"))
            first = min(first, int(where.get("line")))
            last = max(int(where.get("bodyend") or first), first)
            name = member.find("name").text or ""
            found.setdefault(where.get("file"), []).append((first, last, "" if name.startswith("@") else name))
    return {path: sorted(set(items)) for path, items in found.items()}


def comment_above(lines, first):
    """The index where the comment right above line index `first` begins (first if there is none)."""
    begin = first
    if begin > 0 and lines[begin - 1].rstrip().endswith("*/"):
        begin -= 1
        while "/*" not in lines[begin]:
            begin -= 1
        return begin
    while begin > 0 and lines[begin - 1].lstrip().startswith("//"):
        begin -= 1
    return begin


def strip_marks(lines):
    text = []
    for line in lines:
        line = re.sub(r"^\s*(//|/\*+|\*/|\*(?=\s|$))\s?", "", line.rstrip())
        text.append(re.sub(r"\s*\*/$", "", line))
    return text


def escape(line):
    return re.sub(r"([\\*_<>\[\]|`])", r"\\\1", line)


def prose(lines):
    """Paragraphs as text, indented lines as they stand."""
    out, block = [], []

    def flush():
        if block:
            out.extend(["```text", *textwrap.dedent("\n".join(block)).split("\n"), "```"])
            block.clear()

    for line in lines:
        if line.startswith("  ") and line.strip():
            block.append(line)
        else:
            flush()
            out.append(escape(line))
    flush()
    return "\n".join(out).strip()


def declaration_end(lines, first, last):
    """A declaration without a body goes on to its semicolon; a type's closing line is its last."""
    end = last
    while ";" not in lines[end] and "}" not in lines[end] and end + 1 < len(lines):
        end += 1
    return end


def page(path, items):
    lines = path.read_text(encoding="utf-8").split("\n")
    guard = next(i for i, line in enumerate(lines) if line.startswith("#ifndef"))
    name = path.relative_to(INCLUDE.parent)
    head = [line for line in lines[:guard] if "SPDX-License-Identifier" not in line]
    out = [f"# {name}", "", prose(strip_marks(head)), ""]
    groups = []
    covered = -1
    for first, last, entity in items:
        first, last = first - 1, last - 1
        if first <= covered:
            continue
        while first > 0 and re.match(r"^\S.*[^;{}/*]$", lines[first - 1]) and not lines[first - 1].startswith(("#", "//", "*", " *")):
            first -= 1  # A return type or `typedef enum` on a line of its own.
        last = declaration_end(lines, first, last)
        covered = last
        begin = comment_above(lines, first)
        code = lines[first:last + 1]
        is_type = re.match(r"\s*(typedef |FA2_EXPORT )*(struct|class|enum)\b", code[0])
        if begin == first and groups and not is_type:
            groups[-1][0].append(entity)
            groups[-1][2].extend(code if len(code) == 1 else ["", *code])
        else:
            groups.append(([entity], strip_marks(lines[begin:first]), list(code)))
    for names, comment, code in groups:
        title = ", ".join(dict.fromkeys(n for n in names if n)) or "Constants"
        language = "c" if path.stem == "fa2_c" or path.parent.name == "compat" else "cpp"
        out += [f"## {escape(title)}", "", *([prose(comment), ""] if comment else []), f"```{language}",
                *(re.sub(r"\bFA2_EXPORT ", "", line) for line in code), "```", ""]
    return "\n".join(out)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(["doxygen", "-"], input=SETTINGS.format(include=INCLUDE, out=out), text=True, check=True)
        found = entities(pathlib.Path(out) / "xml")
    rows = []
    for file, items in sorted(found.items()):
        path = pathlib.Path(file)
        path = path if path.is_absolute() else ROOT / path
        (folder / f"{path.stem}.md").write_text(page(path, items), encoding="utf-8")
        lines = path.read_text(encoding="utf-8").split("\n")
        head = [line for line in lines if "SPDX" not in line][:12]
        first = re.split(r"(?<=[.:])\s", " ".join(strip_marks(head)))[0]
        rows.append(f"| [{path.relative_to(INCLUDE.parent)}]({path.stem}.md) | {escape(first)} |")
    (folder / "index.md").write_text(
        "# API\n\nThe public headers, as they are installed. Their comments are the reference.\n\n"
        "| header | |\n|---|---|\n" + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
