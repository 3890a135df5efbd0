"""Texts for comparing tokenizers: many scripts, source code, and hostile strings.

Deterministic for a given set of installed files. Translations come from the message catalogues under
/usr/share/locale (Debian: iso-codes brings about 150 languages), source code from Python's own
library, everything else is made here from a seed.
"""

import glob
import os
import random
import struct
import sysconfig
import unicodedata

CHUNK = 4096


def catalogue_texts(path):
    """The translations in one .mo file."""
    with open(path, "rb") as file:
        data = file.read()
    if len(data) < 28 or struct.unpack_from("<I", data)[0] != 0x950412DE:
        return []
    count, _, table = struct.unpack_from("<III", data, 8)
    texts = []
    for i in range(count):
        length, offset = struct.unpack_from("<II", data, table + 8 * i)
        try:
            texts.append(data[offset : offset + length].decode("utf-8"))
        except UnicodeDecodeError:
            pass  # a catalogue in an older encoding
    return texts


def chunks_of(lines, limit):
    """Lines joined to texts of about CHUNK bytes, `limit` bytes together."""
    texts, current, size, total = [], [], 0, 0
    for line in lines:
        current.append(line)
        size += len(line.encode()) + 1
        if size >= CHUNK:
            texts.append("\n".join(current))
            total += size
            current, size = [], 0
            if total >= limit:
                break
    if current:
        texts.append("\n".join(current))
    return texts


def translations():
    texts = []
    for folder in sorted(glob.glob("/usr/share/locale/*/LC_MESSAGES")):
        lines = []
        for path in sorted(glob.glob(folder + "/*.mo")):
            lines += catalogue_texts(path)
            if len(lines) > 6000:
                break
        texts += chunks_of(lines, 32768)
    return texts


def source_code():
    library = sysconfig.get_paths()["stdlib"]
    texts = []
    for path in sorted(glob.glob(os.path.join(library, "*.py")))[:60]:
        with open(path, encoding="utf-8", errors="replace") as file:
            texts += chunks_of(file.read().split("\n"), 32768)
    return texts


def made_up(generator, count):
    """Random characters of every block, with what pre-tokenizers treat specially in between."""
    blocks = [
        b
        for b in range(0, 0x20000, 0x80)
        if sum(unicodedata.category(chr(c)) not in ("Cn", "Cs") for c in range(b, b + 0x80)) > 16
    ]
    glue = [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'\u017f", "\u00a0", "\u3000", "\u200d", "7",
            "123456", "\u0661\u0662", "\u00bd", "...", "!?", " \n ", "\n\n\n", "\u0301", "\u0323\u0307", "a",
            "Hello", " world", "\ufe0f", "\u2028", "\x00", "\x7f", "_", "-", "\u0345", "\u1ebf", "\u212b"]
    texts = []
    for _ in range(count):
        parts = []
        block = generator.choice(blocks)
        for _ in range(generator.randrange(20, 200)):
            if generator.random() < 0.1:
                block = generator.choice(blocks)
            if generator.random() < 0.4:
                parts.append(generator.choice(glue))
            else:
                c = block + generator.randrange(0x80)
                if not 0xD800 <= c < 0xE000:
                    parts.append(chr(c))
        texts.append("".join(parts))
    return texts


def every_character():
    """Every code point, alone between letters and in a row."""
    cps = [chr(c) for c in range(0x30000) if not 0xD800 <= c < 0xE000]
    cps += [chr(c) for c in range(0xE0000, 0xE0200)] + ["\U000f0000", "\U0010ffff"]
    texts = []
    for i in range(0, len(cps), 512):
        row = cps[i : i + 512]
        # The large ideograph blocks are alike: every eighth row of them is enough.
        if 0x3400 <= ord(row[0]) < 0xD7A0 or ord(row[0]) >= 0x20000:
            if i // 512 % 8:
                continue
        texts.append(" x".join(row))
        texts.append("".join(row))
    return texts


def corpus():
    generator = random.Random(20261130)
    return translations() + source_code() + every_character() + made_up(generator, 1500)


def hostile(specials):
    """Texts that tokenizers get wrong: runs, spaces, and the names of control tokens as text."""
    texts = ["", " ", "  ", "\n", "\t\n", "\r\n\r\n", "\x00", "\x00\x00a", "a" * 3000, " " * 3000,
             "\n" * 1000, "ab" * 1500, "\u00e9" * 1000, "1" * 1000, "!" * 1000, " a" * 1000,
             "\u2581", "\u2581\u2581a \u2581", "<0x41>", "<0x0A> <0xFF>", "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 20,
             "\U0001f1e9\U0001f1ea" * 20, "e\u0301" * 200, "\u0301" * 300, "\u1100\u1161\u11a8" * 50,
             "\uac00\u11a8", "\u0958\u0344\u2126\ufb1d", "I'm you're we'VE He'Ll 'S 's's'", "\ufeffx", "\ufffd\ufffd",
             "a\u0085b\u2028c\u2029d", "don\u2019t", "x" * 500 + " " + "y" * 500, "\u0000" * 300]  # fmt: skip
    pieces = ["", " ", "  ", "a", "\n", "\u00e9", "<", ">", "|", "<|", "\u3000", "_", "\u0301"]
    for token in specials:
        texts += [token, "a" + token + "b", " " + token + " ", token * 3, token[:-1], token[1:]]
        half = len(token) // 2
        texts += [token[:half] + " " + token[half:], token[:half] + token + token[half:]]
        for other in specials[:3]:
            texts += [token + other, token[:-1] + other, token + " \n" + other]
    generator = random.Random(7)
    for _ in range(300):
        texts.append("".join(generator.choice(pieces + list(specials)) for _ in range(8)))
    return texts


def write_texts(path, texts):
    with open(path, "wb") as out:
        out.write(struct.pack("<I", len(texts)))
        for text in texts:
            data = text.encode()
            out.write(struct.pack("<I", len(data)) + data)


def write_ids(path, lists):
    with open(path, "wb") as out:
        out.write(struct.pack("<I", len(lists)))
        for ids in lists:
            out.write(struct.pack(f"<I{len(ids)}i", len(ids), *ids))
