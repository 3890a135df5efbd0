#!/usr/bin/env python3
"""Writes src/tokenizer/jinja_casing_table.inc: the characters whose upper or title case is more than
one character (Python's str.upper and str.title; SpecialCasing.txt of Unicode, unconditional rows).

    python3 tools/golden/chat_template_casing.py > src/tokenizer/jinja_casing_table.inc
"""
import unicodedata


def literal(text):
    return "{" + ", ".join(f"0x{ord(c):04X}" for c in text) + "}"


print("// Made by tools/golden/chat_template_casing.py from Unicode", unicodedata.unidata_version)
for code in range(0x110000):
    if 0xD800 <= code < 0xE000:
        continue
    upper, title = chr(code).upper(), chr(code).title()
    if len(upper) > 1 or len(title) > 1:
        print(f"{{0x{code:04X}, {literal(upper)}, {literal(title)}}},")
