#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_ranges.inc: which code points are letters, numbers, spaces and word characters,
as the `tokenizers` wheel sees them, which letters have a case, and which marks its NFC reorders.

The wheel mixes four Unicode versions (regex engine, Rust's char methods, Rust's regex crate, NFC),
and token ids depend on them, so the classes are asked of the wheel itself.

    python tools/golden/tokenizer_unicode.py src/tokenizer/unicode_ranges.inc
"""

import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

LETTER, NUMBER, SPACE, WORD, DIGIT, REORDERED = 1, 2, 4, 8, 16, 32
MARK, UPPER, LOWER = 64, 128, 256
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def removed_by(pre_tokenizer):
    kept = set()
    for _, (begin, end) in pre_tokenizer.pre_tokenize_str("".join(map(chr, CODE_POINTS))):
        kept.update(CODE_POINTS[begin:end])
    return set(CODE_POINTS) - kept


def digits():
    # "a" before every character: a piece that is one character and not "a" was split off.
    text = "".join("a" + chr(c) for c in CODE_POINTS)
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(text)
    return {ord(s) for s, _ in pieces if len(s) == 1 and s != "a"}


def word_characters():
    # A single_word token is found only where no word character stands before it.
    tokenizer = Tokenizer(models.BPE(vocab={"\n": 0}, merges=[]))
    tokenizer.add_tokens([AddedToken("qz", single_word=True, normalized=False)])
    wanted = tokenizer.token_to_id("qz")
    found = set()
    text = "".join(chr(c) + "qz\n" for c in CODE_POINTS)
    encoding = tokenizer.encode(text)
    for token, (begin, _) in zip(encoding.ids, encoding.offsets):
        if token == wanted:
            found.add((begin - 1) // 4)
    return {c for i, c in enumerate(CODE_POINTS) if i not in found}


def reordered_marks():
    # U+0345 has the highest combining class: every other mark moves in front of it.
    normalize = normalizers.NFC().normalize_str
    return {c for c in CODE_POINTS if normalize("\u0345" + chr(c))[-1] == "\u0345"}


def main():
    def matching(regex):
        return removed_by(pre_tokenizers.Split(Regex(regex), "removed"))

    classes = [0] * 0x110000
    for bit, members in (
        (LETTER, matching(r"\p{L}")),
        (NUMBER, matching(r"\p{N}")),
        (SPACE, matching(r"\s")),
        (WORD, word_characters()),
        (DIGIT, digits()),
        (REORDERED, reordered_marks()),
        (MARK, matching(r"\p{M}")),
        (UPPER, matching(r"[\p{Lu}\p{Lt}]")),
        (LOWER, matching(r"\p{Ll}")),
    ):
        print(f"class {bit}: {len(members)} code points", file=sys.stderr)
        for c in members:
            classes[c] |= bit
    ranges = []
    for c, value in enumerate(classes):
        if not value:
            continue
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == value:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, value])
    lines, line = [], "   "
    for begin, end, value in ranges:
        item = f" {{0x{begin:X}, {end - begin + 1}, {value}}},"
        if len(line) + len(item) > 100:
            lines.append(line)
            line = "   "
        line += item
    lines.append(line)
    with open(sys.argv[1], "w") as out:
        out.write(
            "// Written by tools/golden/tokenizer_unicode.py from the tokenizers wheel "
            f"{tokenizers.__version__}.\n"
            "// Bits: 1 \\p{L}, 2 \\p{N}, 4 \\s, 8 \\w, 16 numeric for Digits, 32 a mark for NFC, 64 \\p{M},\n"
            "// 128 \\p{Lu} or \\p{Lt}, 256 \\p{Ll}. First of a run, how many, their bits; ascending.\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
