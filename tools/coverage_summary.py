#!/usr/bin/env python3
"""Prints the share of lines of src/ that ran, from `llvm-cov export -summary-only`.

    tools/coverage_summary.py build/ci-logs/coverage.json

One line a layer and one for all of src/, with the ten files that have the most lines that never ran.
A share is reported, not enforced: the aim is 90 %.
"""
import collections
import json
import pathlib
import sys

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src"


def read(report):
    """{path below src/: (lines, missed)}. The build reaches headers through links: they resolve."""
    files = {}
    for entry in json.loads(report)["data"][0]["files"]:
        path = pathlib.Path(entry["filename"]).resolve()
        if SOURCE in path.parents:
            lines = entry["summary"]["lines"]
            known = files.get(path.relative_to(SOURCE).as_posix(), (0, 0))
            files[path.relative_to(SOURCE).as_posix()] = (
                known[0] + lines["count"], known[1] + lines["count"] - lines["covered"])
    return files


def main():
    files = read(pathlib.Path(sys.argv[1]).read_text())
    layers = collections.defaultdict(lambda: [0, 0])
    for name, (lines, missed) in files.items():
        for key in (name.split("/")[0], "src"):
            layers[key][0] += lines
            layers[key][1] += missed
    if not layers["src"][0]:
        print("coverage: no line of src/ was recorded")
        return 1
    for name, (lines, missed) in sorted(layers.items(), key=lambda item: (item[0] == "src", item[0])):
        print(f"coverage: {name:10} {100 * (lines - missed) / lines:5.1f} % of {lines} lines")
    print("coverage: most lines that never ran: " + ", ".join(
        f"{name} {missed}" for name, (_, missed) in
        sorted(files.items(), key=lambda item: -item[1][1])[:10] if missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
