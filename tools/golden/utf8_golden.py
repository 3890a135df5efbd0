#!/usr/bin/env python3
"""Makes tests/unit/base/golden/utf8.txt: what Python's UTF-8 decoder does with all sequences of one to
four bytes out of those where the rules change.

    python tools/golden/utf8_golden.py tests/unit/base/golden/utf8.txt

Each line: number of bytes, first byte, and two FNV-1a hashes over all sequences that begin so, in
order: of the text decoded with errors="replace" (as UTF-8, then one 0xFF), and of the number of
bytes before an unfinished character at the end (one byte each). Unfinished is what begins the UTF-8
form of some character; CPython's incremental decoder agrees, except that it also holds back ED A0 to
ED BF, the beginnings of surrogates, which nothing can complete. Made with CPython 3.11.
"""

import codecs
import itertools
import sys

EDGES = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1,
         0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]


def fnv(state, data):
    for byte in data:
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return state


def unfinished_beginnings():
    forms = (chr(c).encode() for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    return {form[:n] for form in forms for n in range(1, len(form))}


def complete_prefix(data, beginnings, decoder):
    held = next((n for n in (3, 2, 1) if data[-n:] in beginnings and n <= len(data)), 0)
    decoder.decode(data)
    theirs = decoder.getstate()[0]
    assert len(theirs) == held or (theirs[0] == 0xED and theirs[1] >= 0xA0), (data, held, theirs)
    return len(data) - held


def main():
    beginnings = unfinished_beginnings()
    new_decoder = codecs.getincrementaldecoder("utf-8")
    with open(sys.argv[1], "w") as out:
        for size in range(1, 5):
            for first in EDGES:
                text_hash = prefix_hash = 0xCBF29CE484222325
                for rest in itertools.product(EDGES, repeat=size - 1):
                    data = bytes((first, *rest))
                    text = data.decode("utf-8", "replace").encode()
                    text_hash = fnv(text_hash, text + b"\xff")
                    prefix = complete_prefix(data, beginnings, new_decoder("replace"))
                    prefix_hash = fnv(prefix_hash, bytes([prefix]))
                out.write(f"{size} {first:02x} {text_hash:016x} {prefix_hash:016x}\n")


if __name__ == "__main__":
    main()
