#!/usr/bin/env python3
"""Checks that the source keeps the layers of the design.

    tools/check_layers.py              # the tree this script is in
    tools/check_layers.py --root DIR   # another one

The rules, each with the line that breaks it:
  - a quoted include names its layer ("tensor/dtype.h") or the public API ("pianola/error.h"), and
    the file is there;
  - a layer includes only layers below it: the build's include paths say the same, but a missing
    dependency in CMake is easily mended the wrong way round;
  - what the CMakeLists.txt of a layer names as DEPENDS is what stands here;
  - the public API includes nothing but itself and system headers;
  - what is in backends/cuda/ is included from there and from tests of it: everything else sees
    backends/cuda.h, which a build without CUDA has as well;
  - environment variables are read in apps/ only: below it, options are arguments;
  - no #if on CUDA in C++: CMake links a backend or its stub.
"""
import argparse
import pathlib
import re
import sys

# Each layer with the layers directly below it. Siblings (models and backends) do not see each other.
BELOW = {
    "base": [],
    "tensor": ["base"],
    "tokenizer": ["base"],
    "weights": ["tensor"],
    "cache": ["tensor"],
    "plan": ["cache"],
    "models": ["weights", "plan"],
    "backends": ["plan"],
    "engine": ["models", "backends"],
    "generate": ["engine", "tokenizer"],
    "serve": ["generate"],
}
SUFFIXES = {".h", ".cc", ".inc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
GETENV = re.compile(r"\b(secure_)?getenv\s*\(|\benviron\b")
CUDA_IF = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|elifdef|elifndef)\b.*CUDA")


def closure(layer):
    """The layer and all layers below it."""
    seen, todo = set(), [layer]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(BELOW[name])
    return seen


def strip_comments(text):
    """The text with comments and string literals blanked, lines kept; includes survive."""
    pattern = re.compile(
        r'R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|(?<!include )"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def sources(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())


def check_file(root, path, allowed, may_read_environment):
    """Yields (line, message) for each broken rule of one file; `allowed` None means any layer."""
    inside_cuda = root / "src/backends/cuda" in path.parents
    for number, line in enumerate(strip_comments(path.read_text(errors="replace")).split("\n"), 1):
        include = INCLUDE.match(line)
        if include:
            kind, name = include.groups()
            first = name.split("/")[0]
            if kind == "<":
                # Only users of the installed library write <pianola/...>.
                if first in BELOW or (first == "pianola" and root / "examples" not in path.parents):
                    yield number, f"<{name}>: headers of pianola are included with quotes"
                continue
            if first == "pianola" and "/" in name:
                if not (root / "include" / name).is_file():
                    yield number, f'"{name}": there is no include/{name}'
            elif allowed is not None:
                if first not in BELOW or "/" not in name or ".." in name.split("/"):
                    yield number, f'"{name}": an include starts with its layer, as in "base/check.h"'
                elif first not in allowed:
                    yield number, f'"{name}": the layer {first} is not below this one'
                elif not (root / "src" / name).is_file():
                    yield number, f'"{name}": there is no src/{name}'
        if include and include.group(2).startswith("backends/cuda/") and not inside_cuda:
            yield number, f'"{include.group(2)}": outside of backends/cuda/ there is backends/cuda.h'
        if not may_read_environment and GETENV.search(line):
            yield number, "reads an environment variable: only apps/ does, and passes a value down"
        if path.suffix in {".h", ".cc", ".inc"} and CUDA_IF.match(line):
            yield number, "a condition on CUDA: CMake chooses the backend or its stub"


def check_cmake(root):
    """Yields (path, message) where a layer's CMake target depends on more than its place allows."""
    for path in sorted((root / "src").glob("*/CMakeLists.txt")):
        for name, arguments in re.findall(r"pianola_layer\(\s*(\w+)([^)]*)\)", path.read_text()):
            depends = re.search(r"\bDEPENDS\b((?:\s+[a-z_]+)*)", arguments)
            named = set(depends.group(1).split()) if depends else set()
            if name not in BELOW:
                yield path, f"the layer {name} is not in tools/check_layers.py"
            elif not named <= closure(name) - {name}:
                extra = ", ".join(sorted(named - closure(name)) or [name])
                yield path, f"depends on {extra}, which is not below {name}"


def check(root):
    """All broken rules as "file:line: message"."""
    found = []

    def report(path, line, message):
        found.append(f"{path.relative_to(root)}:{line}: {message}")

    for path in sources(root / "include"):
        for line, message in check_file(root, path, set(), False):
            report(path, line, message)
    for folder in sorted(p for p in (root / "src").iterdir() if p.is_dir()):
        if folder.name not in BELOW:
            report(folder, 1, "is not a layer that tools/check_layers.py knows")
            continue
        for path in sources(folder):
            for line, message in check_file(root, path, closure(folder.name), False):
                report(path, line, message)
    for folder in ("apps", "examples"):
        for path in sources(root / folder):
            for line, message in check_file(root, path, None, folder == "apps"):
                report(path, line, message)
    for path, message in check_cmake(root):
        report(path, 1, message)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent)
    found = check(parser.parse_args().root.resolve())
    for line in found:
        print(line)
    print(f"layers: {len(found)} broken rules" if found else "layers: every include points down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
