#!/usr/bin/env python3
"""Runs clang-tidy over the files of a build, those changed last first.

    tools/run_tidy.py -p build/ci                     # every file
    tools/run_tidy.py -p build/ci --seconds 300       # as many as fit; the rest is named
    tools/run_tidy.py -p build/ci src/base/error.cc   # these

A file that was clean is not read again until it, a header it includes, its flags or .clang-tidy
change: the key is the hash of the preprocessed text. The keys are kept in $PIANOLA_CACHE/tidy.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path(os.environ.get("PIANOLA_CACHE") or pathlib.Path.home() / ".cache/pianola") / "tidy"


def changed_files(base):
    """The files that differ from `base`, as absolute paths. All of them count without such a commit."""
    result = subprocess.run(["git", "diff", "--name-only", base, "--"], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return {ROOT / name for name in result.stdout.split("\n") if name}


def age_order(files):
    """`files` with those of the latest commits first."""
    log = subprocess.run(["git", "log", "--format=", "--name-only", "-n", "500"], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    rank = {}
    for name in log.split("\n"):
        rank.setdefault(ROOT / name, len(rank))
    return sorted(files, key=lambda file: (rank.get(file, len(rank)), file))


def preprocess(entry):
    """(key, every file that went in) of one entry of the compilation database."""
    command, skip = [], False
    for argument in shlex.split(entry["command"]):
        if skip or argument in ("-c", "-MD", "-MMD") or argument.endswith("ccache"):
            skip = False
        elif argument in ("-o", "-MF", "-MT"):
            skip = True
        elif not argument.startswith(("-fprofile-instr", "-fcoverage", "-fsanitize")):
            command.append(argument)
    result = subprocess.run([*command, "-E", "-o", "-"], cwd=entry["directory"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode:
        return None
    digest = hashlib.sha256(result.stdout)
    # A comment may hold a NOLINT, and the preprocessor drops comments: our own files count as text.
    marked = re.findall(rb'^# \d+ "([^"]+)"', result.stdout, re.M)
    for name in sorted({pathlib.Path(os.fsdecode(mark)).resolve() for mark in set(marked)}):
        if ROOT in name.parents and name.is_file():
            digest.update(name.read_bytes())
    for text in ("\0".join(command), (ROOT / ".clang-tidy").read_text(), "clang-tidy-19"):
        digest.update(text.encode())
    return digest.hexdigest()


def check(entry, build, deadline):
    """(file, outcome, text): outcome is clean, cached, found or late."""
    file = entry["file"]
    if time.monotonic() > deadline:
        return file, "late", ""
    key = preprocess(entry)
    if key and (CACHE / key).exists():
        return file, "cached", ""
    result = subprocess.run(["clang-tidy-19", "--quiet", "-p", build, file], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode == 0:
        if key:
            CACHE.mkdir(parents=True, exist_ok=True)
            (CACHE / key).touch()
        return file, "clean", ""
    return file, "found", result.stdout + "\n".join(
        line for line in result.stderr.split("\n") if "error" in line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-p", dest="build", required=True, help="a build folder of clang 19")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no file after that")
    parser.add_argument("--since", help="only the files that differ from this commit")
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    database = json.loads((pathlib.Path(arguments.build) / "compile_commands.json").read_text())
    # Kernels are nvcc's: clang does not take its flags.
    entries = {pathlib.Path(entry["file"]).resolve(): entry for entry in database
               if not entry["file"].endswith(".cu")}
    wanted = {file.resolve() for file in arguments.files} or set(entries)
    if arguments.since:
        wanted &= changed_files(arguments.since)
    deadline = time.monotonic() + arguments.seconds
    counts = {"clean": 0, "cached": 0, "found": 0, "late": 0}
    late = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(check, entries[file], arguments.build, deadline)
                for file in age_order(wanted & set(entries))]
        for job in concurrent.futures.as_completed(jobs):
            file, outcome, text = job.result()
            counts[outcome] += 1
            if outcome == "found":
                print(text, flush=True)
            elif outcome == "late":
                late.append(os.path.relpath(file, ROOT))
    if late:
        print(f"no time was left for {len(late)} files: {' '.join(sorted(late))}")
    print(f"clang-tidy: {counts['clean']} files clean, {counts['cached']} unchanged since they were, "
          f"{counts['found']} with findings, {counts['late']} not read")
    return 1 if counts["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
