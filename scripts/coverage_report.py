#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Branches of src/ that ran, from `llvm-cov export`: a line a folder, before and after the exemptions that are argued.

    scripts/coverage_report.py EXPORT.json [--exempt FILE] [--list]

A branch is a place in the source and one of its two outcomes. Templates and targets compile it many times: it ran if it ran in any of
them. A macro's branch counts at each place that uses the macro. --list prints each outcome that did not run and is not exempt.

An exemption (scripts/coverage_exempt.txt) is a line: path pattern | regular expression of the source line | reason. It takes out
outcomes that did not run only. One that matches none of them is named: this CPU reaches it, or it is old.
"""
import argparse
import collections
import fnmatch
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPANSION = 1  # a region's kind in the export


def use_sites(function):
    """File id to the place (path, line, column) in the function's own file at which that file's text is expanded; None for the own file."""
    parents = {}
    for line, column, _, _, _, file, expanded, kind in function["regions"]:
        if kind == EXPANSION:
            parents[expanded] = (file, line, column)

    def site(file):
        place = None
        while file in parents:
            file, line, column = parents[file]
            place = (function["filenames"][file], line, column)
        return place
    return site


def outcomes(export):
    """(path, line, column, place in a macro, outcome) to whether it ran in any instantiation."""
    ran = {}
    for function in export["data"][0]["functions"]:
        site = use_sites(function)
        for branch in function["branches"]:
            line, column, taken, not_taken, file = branch[0], branch[1], branch[4], branch[5], branch[6]
            inside = (function["filenames"][file], line, column)
            path, line, column = site(file) or inside
            for outcome, count in ((True, taken), (False, not_taken)):
                key = (path, line, column, inside, outcome)
                ran[key] = ran.get(key, False) or count > 0
    return ran


def read_exemptions(path):
    rules = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip() or text.startswith("#"):
            continue
        parts = [part.strip() for part in text.split(" | ")]
        if len(parts) != 3:
            raise SystemExit(f"{path}:{number}: must be: path pattern | regular expression | reason")
        rules.append((parts[0], re.compile(parts[1]), parts[2]))
    return rules


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=pathlib.Path)
    parser.add_argument("--exempt", type=pathlib.Path, default=ROOT / "scripts/coverage_exempt.txt")
    parser.add_argument("--list", action="store_true", help="print each outcome that did not run and is not exempt")
    args = parser.parse_args()

    rules = read_exemptions(args.exempt)
    sources, used = {}, collections.Counter()
    folders = collections.defaultdict(lambda: [0, 0, 0])
    missing = []
    for (path, line, column, _, outcome), ran in sorted(outcomes(json.loads(args.export.read_text())).items()):
        if "/src/" not in path:
            continue
        name = "src/" + path.rsplit("/src/", 1)[1]
        total = folders["/".join(name.split("/")[1:2])]
        total[0] += 1
        if ran:
            total[1] += 1
            continue
        if name not in sources:
            sources[name] = pathlib.Path(path).read_text().splitlines()
        text = sources[name][line - 1].strip()
        rule = next((r for r in rules if fnmatch.fnmatch(name, r[0]) and r[1].search(text)), None)
        if rule:
            used[rule] += 1
            total[2] += 1
        else:
            missing.append(f"{name}:{line}:{column}: never {str(outcome).lower()}: {text}")

    if args.list:
        print("\n".join(missing))
    print(f"{'folder':<12}{'outcomes':>9}{'ran':>8}{'exempt':>8}{'ran %':>8}{'after exemptions %':>20}")
    folders["all"] = [sum(column) for column in zip(*folders.values())]
    for folder, (count, ran, exempt) in folders.items():
        after = 100 * ran / (count - exempt) if count > exempt else 100
        print(f"{folder:<12}{count:>9}{ran:>8}{exempt:>8}{100 * ran / count:>8.1f}{after:>20.1f}")
    for rule in rules:
        print(f"{used[rule]:>5} exempt: {rule[0]}: {rule[2]}" + ("" if used[rule] else " (matches nothing)"))


if __name__ == "__main__":
    main()
