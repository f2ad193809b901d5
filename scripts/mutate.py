#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutation run: changes one operator or constant of src/attention or src/reference at a time and asks the tests whether they see it.

    scripts/mutate.py [--count N] [--seed N] [--part I/N] [--all-targets] [--folders A,B] [--build DIR] [--list] [FILE:LINE...]

Each mutant is built and its suites run (few cases, AVX2; with --all-targets on the best of this CPU and its lanes too) until one fails: killed. Those that no suite fails are printed
with their line: either a test is missing, or the change means nothing (a block's size, a hint), which the reader decides. Two classes of
survivors are counted apart: those in functions of scripts/mutate_exempt.txt, of which it is argued that no result follows from what they
do, and default values of members in headers, which mostly are set before they are read.
Sources are changed in a copy of the tree, build-mutate/tree. About a minute a mutant on two cores.
"""
import argparse
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

# What is written instead of what. Text in strings, comments and #includes is left alone.
CHANGES = [
    (r"(?<![<>=!+\-*/&|-])<(?![<=])(?= )", "<="), (r"(?<= )<=(?= )", "<"), (r"(?<=[ )])>(?=[ ])(?!=)", ">="), (r"(?<= )>=(?= )", ">"),
    (r"==", "!="), (r"!=", "=="), (r"&&", "||"), (r"\|\|", "&&"),
    (r"(?<= )\+(?= )", "-"), (r"(?<= )-(?= )", "+"), (r"(?<= )\*(?= )", "+"), (r"(?<= )/(?= )", "*"), (r"\+=", "-="), (r"-=", "+="),
    (r"\bstd::min\b", "std::max"), (r"\bstd::max\b", "std::min"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"(?<![\w.])0(?![\w.])", "1"), (r"(?<![\w.])1(?![\w.])", "2"), (r"(?<![\w.])2(?![\w.])", "3"),
    (r"(?<![\w.])0\.0(?!\w)", "1.0"), (r"(?<![\w.])1\.0(?!\w)", "2.0"),
]  # fmt: skip
SUITES = [
    "reference_gradient_test", "reference_error_test", "attention_alibi_reach_test", "attention_error_test", "attention_random_test", "attention_edge_test", "attention_mask_test",
    "attention_block_mask_test", "attention_bias_test", "attention_alibi_test", "attention_nonfinite_test", "attention_mask_pairs_test", "attention_plan_test", "attention_plan_workers_test", "attention_plan_table_test", "attention_workspace_test",
    "attention_grid_test", "attention_head_batch_test", "attention_page_edge_test", "attention_large_scores_test",
]  # fmt: skip


def code_of(line):
    """The line with strings, comments and what else is no code blanked."""
    if re.match(r"\s*(#|//|\*|template|static_assert|using |namespace |class |struct )", line):
        return ""
    line = re.sub(r'"(\\.|[^"\\])*"', lambda m: " " * len(m.group()), line)
    line = re.sub(r"template <[^>]*>|<[A-Za-z_:]+[^<>;()&|]*>", lambda m: "_" * len(m.group()), line)  # template arguments
    return re.sub(r"//.*", lambda m: " " * len(m.group()), line)


def mutants_of(root, folders):
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".cc", ".h"):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
                code = code_of(line)
                for pattern, new in CHANGES:
                    for match in re.finditer(pattern, code):
                        changed = line[: match.start()] + new + line[match.end() :]
                        found.append((str(path.relative_to(root)), number, line, changed))
    return found


def function_of(lines, number):
    """The name of the function in which a line lies, as its definition at the left edge has it; "" in a class or outside of functions."""
    for line in reversed(lines[:number]):
        if line.startswith("}"):
            return ""
        match = re.match(r"(?!template|namespace|using|static_assert)[A-Za-z_].*?([\w:~]+)\(", line)
        if match:
            return match.group(1)
    return ""


def is_default(file, line):
    """Whether a line of a header gives a member of a class, or of one in it, its value: numbers and truth alone."""
    return file.endswith(".h") and re.match(r"( {2}| {4})[\w:<>]+( \w+ = (\d[\d.]*|true|false)[,;])+\s*(//.*)?$", line) is not None


def read_exemptions(path):
    """(path, function) pairs."""
    exempt = set()
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip() or text.startswith("#"):
            continue
        parts = [part.strip() for part in text.split(" | ")]
        if len(parts) != 3:
            raise SystemExit(f"{path}:{number}: must be: path | function | reason")
        exempt.add((parts[0], parts[1]))
    return exempt


def check_exemptions(root, exempt):
    """Ends where a function is not found: it was renamed, or has gone."""
    for file, function in sorted(exempt):
        lines = (root / file).read_text(encoding="utf-8").splitlines()
        if all(function_of(lines, number) != function for number in range(1, len(lines))):
            raise SystemExit(f"scripts/mutate_exempt.txt: {file} has no function {function}")


def run(command, timeout, **options):
    try:
        return subprocess.run(
            command, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
        )
    except subprocess.TimeoutExpired:
        return None


class Tree:
    """A copy of the sources with a build of its own."""

    def __init__(self, root, build, all_targets):
        self.root = build / "tree"
        self.build = build / "build"
        for name in ("src", "include", "tests", "cmake", "bench", "tools", "CMakeLists.txt"):
            source, target = root / name, self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            command = ["cp", "-ru", str(source) + ("/." if source.is_dir() else ""), str(target)]
            if source.is_dir():
                target.mkdir(exist_ok=True)
            subprocess.run(command, check=True)
        subprocess.run(
            ["cmake", "-S", self.root, "-B", self.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DFA2_BUILD_TESTS=ON",
             f"-DCMAKE_CXX_FLAGS=-DHWY_DISABLED_TARGETS={6336 if all_targets else 6592}", "-DFA2_TEST_AMX_EMULATED=OFF", "-DFA2_STATIC_AND_SHARED=OFF",
             "-DFA2_BUILD_BENCHMARKS=OFF", "-DFA2_BUILD_TOOLS=OFF", "-DFA2_BUILD_EXAMPLES=OFF"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.suites = self._known()
        best = {**os.environ, "FA2_TEST_FEW_CASES": "2"}
        self.environments = [best]
        if all_targets:
            lanes = {"FA2_ENGINE": "f32", "FA2_TEST_OTHER_ENGINE": "1"}
            self.environments += [{**best, "FA2_MAX_TARGET": "avx2"}, {**best, **lanes}]
        self.seconds = {}

    def _known(self):
        listed = subprocess.run(["ninja", "-C", self.build, "-t", "targets", "all"], stdout=subprocess.PIPE, text=True, check=True)
        names = {line.split(":")[0].rsplit("/", 1)[-1] for line in listed.stdout.splitlines()}
        return [suite for suite in SUITES if suite in names]

    def compile(self):
        return run(["ninja", "-C", self.build, *self.suites], 3600)

    def failing(self):
        """The first suite that fails, is killed or takes ten times as long as it should; None where all pass."""
        for suite in self.suites:
            program = next(self.build.rglob(suite))
            for environment in self.environments:
                begin = time.monotonic()
                result = run([program], 60 + 10 * self.seconds.get(suite, 60), env=environment)
                if result is None or result.returncode != 0:
                    return suite
                self.seconds.setdefault(suite, time.monotonic() - begin)
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the sample, for machines of many cores")
    parser.add_argument("--all-targets", action="store_true", help="AVX-512 and AMX too")
    parser.add_argument("--folders", default="src/attention,src/reference")
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build-mutate"))
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("places", nargs="*", metavar="FILE:LINE", help="these lines' mutants instead of a sample")
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    everything = mutants_of(root, args.folders.split(","))
    places = {tuple(place.rsplit(":", 1)) for place in args.places}
    if places:
        sample = [m for m in everything if (m[0], str(m[1] + 1)) in places]
    else:
        sample = random.Random(args.seed).sample(everything, min(args.count, len(everything)))
    part, parts = (int(number) for number in args.part.split("/"))
    sample = sample[part - 1 :: parts]
    if args.list:
        for file, number, _, changed in sample:
            print(f"{file}:{number + 1}: {changed.strip()}")
        return 0
    exempt = read_exemptions(root / "scripts/mutate_exempt.txt")
    check_exemptions(root, exempt)
    tree = Tree(root, args.build.resolve(), args.all_targets)
    built = tree.compile()
    if built is None or built.returncode != 0 or tree.failing() is not None:
        print("mutate.py: the tree does not build and pass as it is", file=sys.stderr)
        return 2
    print(f"{len(everything)} mutants in {args.folders}; {len(sample)} of them with {len(tree.suites)} suites", flush=True)
    counts = {"killed": 0, "not compiled": 0, "no result changes": 0, "default value": 0, "SURVIVED": 0}
    for file, number, line, changed in sample:
        path = tree.root / file
        original = path.read_text(encoding="utf-8")
        lines = original.split("\n")
        lines[number] = changed
        path.write_text("\n".join(lines), encoding="utf-8")
        try:
            built = tree.compile()
            if built is None or built.returncode != 0:
                verdict, by = "not compiled", ""
            else:
                by = tree.failing()
                if by is not None:
                    verdict, by = "killed", " by " + by
                else:
                    known = (file, function_of(lines, number)) in exempt
                    verdict = "no result changes" if known else "default value" if is_default(file, line) else "SURVIVED"
                    by = ""
        finally:
            path.write_text(original, encoding="utf-8")
            shutil.copystat(root / file, path)
            path.touch()
        counts[verdict] += 1
        print(f"{verdict}{by}: {file}:{number + 1}: {line.strip()}  ->  {changed.strip()}", flush=True)
    tried = counts["killed"] + counts["SURVIVED"]
    print(f"{counts['killed']} of {tried} killed ({100 * counts['killed'] / max(tried, 1):.0f}%), "
          f"{counts['no result changes']} change no result, {counts['default value']} default values, "
          f"{counts['not compiled']} did not compile")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
