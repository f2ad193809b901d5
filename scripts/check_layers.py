#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the #include lines of src/ and include/ against the layers that docs/design.md describes.

    scripts/check_layers.py [--summary] [ROOT]

A file may include files of its own folder and of lower layers, never of a higher one or of another folder of
its own layer, so that no cycle can arise. --summary prints the include graph of src/ in numbers instead.
Exits with 1 and a line for each wrong include.
"""
import argparse
import pathlib
import re
import sys

# From the bottom up. Folders of one layer do not include each other. A name with a dot is a file, which
# then does not count with its folder: engines.* choose among the engines and so stand above them.
LAYERS = [
    ["include/fa2"],
    ["include/fa2/compat"],
    ["src/common"],
    ["src/checks"],
    ["src/platform"],
    ["src/simd"],
    ["src/simd/math"],
    ["src/simd/rowwise"],
    ["src/simd/lane", "src/simd/amx", "src/simd/direct"],
    ["src/simd/amx/forward", "src/simd/amx/backward"],
    ["src/simd/amx/instances"],
    ["src/simd/engines.h", "src/simd/engines.cc"],
    ["src/threading"],
    ["src/context"],
    ["src/attention/call"],
    ["src/attention/schedule"],
    ["src/attention/tensors", "src/attention/scores"],
    ["src/attention/few_queries"],
    ["src/attention/forward", "src/attention/backward"],
    ["src/ops", "src/reference"],
    ["src/verify/page"],
    ["src/verify/cases"],
    ["src/verify/model"],
    ["src/verify/judge"],
    ["src/c_api"],
    ["src/compat"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# What such files count as instead of their folder.
ALIAS = {"src/simd/engines.h": "src/simd/engines", "src/simd/engines.cc": "src/simd/engines"}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
SOURCES = {".h", ".cc", ".c"}


def place_of(path):
    """The folder, or the file with a rule of its own, that `path` counts as, and its layer (None: unknown)."""
    if path in LEVEL:
        return ALIAS.get(path, path), LEVEL[path]
    folder = path.rsplit("/", 1)[0]
    return folder, LEVEL.get(folder)


def includes_of(root):
    """{file: [(line number, included file)]} over include/ and src/, paths as from `root`."""
    graph = {}
    for top in ("include", "src"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SOURCES:
                continue
            lines = file.read_text(encoding="utf-8").splitlines()
            found = []
            for number, line in enumerate(lines, 1):
                match = INCLUDE.match(line)
                if match is None:
                    continue
                target = match.group(1)
                if target.startswith("fa2/"):
                    target = "include/" + target
                if target.startswith(("include/fa2/", "src/")):
                    found.append((number, target))
            graph[file.relative_to(root).as_posix()] = found
    return graph


def check(graph):
    """The wrong includes, a sentence each."""
    errors = []
    unknown = set()
    for file, found in graph.items():
        folder, level = place_of(file)
        if level is None:
            unknown.add(folder)
            continue
        for number, target in found:
            other, below = place_of(target)
            if below is None:
                unknown.add(other)
            elif other != folder and below >= level:
                errors.append(f"{file}:{number}: {folder} includes {target}, but {other} is "
                              f"{'above it' if below > level else 'beside it, in the same layer'}; "
                              "move what both need into a lower layer")
    errors += [f"{folder}: has no layer; give it one in LAYERS of scripts/check_layers.py" for folder in sorted(unknown)]
    return errors


def cycles(edges):
    """Groups of more than one node that all reach each other (Tarjan)."""
    index, low, on_stack, stack, groups = {}, {}, set(), [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for next_node in edges.get(node, ()):
            if next_node not in index:
                visit(next_node)
                low[node] = min(low[node], low[next_node])
            elif next_node in on_stack:
                low[node] = min(low[node], index[next_node])
        if low[node] == index[node]:
            group = []
            while True:
                group.append(stack.pop())
                on_stack.discard(group[-1])
                if group[-1] == node:
                    break
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return groups


def longest_chain(edges):
    """Files on the longest chain of includes."""
    depth = {}

    def visit(node):
        if node not in depth:
            depth[node] = 0  # ends a cycle, which include guards allow
            depth[node] = 1 + max((visit(n) for n in edges.get(node, ())), default=0)
        return depth[node]

    return max(map(visit, edges), default=0)


def summary(graph):
    graph = {file: [t for _, t in found if t.startswith("src/")] for file, found in graph.items()
             if file.startswith("src/")}
    folder = lambda path: place_of(path)[0]
    folders, between = {}, {}
    for file, targets in graph.items():
        folders[folder(file)] = folders.get(folder(file), 0) + 1
        for target in targets:
            if folder(target) != folder(file):
                between.setdefault(folder(file), set()).add(folder(target))
    counts = [len(targets) for targets in graph.values()]
    largest = max(folders, key=folders.get)
    print(f"files in src/                     {len(graph)}")
    print(f"folders                           {len(folders)}")
    print(f"files in the largest folder       {folders[largest]} ({largest})")
    print(f"includes of src/ files            {sum(counts)}")
    print(f"includes across folders           "
          f"{sum(folder(t) != folder(f) for f, targets in graph.items() for t in targets)}")
    print(f"pairs of folders                  {sum(map(len, between.values()))}")
    print(f"most includes in one file         {max(counts)}")
    print(f"files on the longest chain        {longest_chain(graph)}")
    groups = cycles(between)
    print(f"cycles between folders            {len(groups)}"
          + "".join(f" ({', '.join(group)})" for group in groups))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--summary", action="store_true", help="print the include graph in numbers")
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    graph = includes_of(args.root)
    if not graph:
        sys.exit(f"check_layers.py: no sources under {args.root}/include and {args.root}/src")
    if args.summary:
        summary(graph)
        return
    errors = check(graph)
    print("\n".join(errors) if errors else f"check_layers.py: {len(graph)} files keep to the layers")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
