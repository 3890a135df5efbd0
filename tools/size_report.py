#!/usr/bin/env python3
"""Prints the files and functions that are longer than the style asks for. Never fails.

    tools/size_report.py [--root DIR]

Files: about 500 lines, kernels 700. Functions: about 80 lines, kernels 120. Functions are found by
their braces: a `{` that follows a `)` outside any other function opens one. That is right for code
that clang-format has laid out, and needs no compiler.
"""
import argparse
import pathlib
import re
import sys

from check_layers import sources, strip_comments

KERNEL = re.compile(r"(^|/)kernels/|\.cuh?$")
NOT_A_NAME = {"if", "for", "while", "switch", "catch", "return", "alignas", "noexcept", "decltype",
              "requires", "defined", "sizeof", "__attribute__"}


def function_name(head):
    """The name of the function that `head` (the text before its brace) declares, or None."""
    head = re.sub(r"^\s*#.*$", "", head, flags=re.M)
    if ")" not in head or re.match(r"\s*(class|struct|enum|union|namespace|extern)\b", head):
        return None
    for name in re.findall(r"((?:~?\w+|operator\s*\S{1,3}))\s*\(", head):
        if name not in NOT_A_NAME:
            return name
    return None


def functions(text):
    """Yields (first line, name, lines) of the outermost functions."""
    text = strip_comments(text)
    depth, start, open_depth, name, line, first = 0, 0, None, "", 1, 1
    for index, char in enumerate(text):
        if char == "\n":
            line += 1
        elif char == "{":
            if open_depth is None:
                head = text[start:index]
                found = function_name(head)
                if found:
                    name, open_depth = found, depth
                    first = line - head.lstrip().count("\n")
            depth += 1
            start = index + 1
        elif char == "}":
            depth -= 1
            start = index + 1
            if open_depth == depth:
                yield first, name, line - first + 1
                open_depth = None
        elif char == ";":
            start = index + 1


def report(root):
    """What is over, as lines of text."""
    found = []
    for folder in ("include", "src", "apps", "examples", "tests", "tools", "bench"):
        for path in sources(root / folder):
            name = path.relative_to(root).as_posix()
            kernel = bool(KERNEL.search(name))
            text = path.read_text(errors="replace")
            lines = text.count("\n")
            if lines > (700 if kernel else 500):
                found.append(f"{name}: {lines} lines")
            for line, function, length in functions(text):
                if length > (120 if kernel else 80):
                    found.append(f"{name}:{line}: {function}: {length} lines")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent)
    found = report(parser.parse_args().root.resolve())
    for line in found:
        print(line)
    print(f"size report: {len(found)} files or functions are over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
