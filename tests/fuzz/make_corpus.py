#!/usr/bin/env python3
"""Makes the seed files under tests/fuzz/corpus/{gguf,safetensors,tokenizer_json}: small files that reach the deep
parts of each reader. Deterministic; standard library only.

    python tests/fuzz/make_corpus.py
"""

import base64
import json
import struct
from pathlib import Path

ROOT = Path(__file__).parent / "corpus"
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def array(name, kind, values):
    return key(name, ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def tensor(name, dims, kind, offset):
    return (text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
            + struct.pack("<IQ", kind, offset))


def gguf(keys, tensors, data, version=3, alignment=32):
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    return head + b"\0" * (-len(head) % alignment) + b"\0" * data


def write(folder, name, data):
    path = ROOT / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def unigram():
    """A unigram model behind a charsmap whose only key, A, becomes b."""
    units = [0] * 66
    units[ord("A")] = 1 << 10 | 1 << 8 | ord("A")
    units[ord("A") ^ 1] = 1 << 31
    charsmap = struct.pack("<I66I", 4 * len(units), *units) + b"b\0"
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    vocab = [["<pad>", 0], ["<unk>", 0], ["\u2581", -2.5], ["a", -3], ["b", -3.5], ["ab", -5], ["<0xFF>", -9]]
    return json.dumps({
        "added_tokens": [{"id": 0, "content": "<pad>", "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
            {"type": "Strip", "strip_left": True, "strip_right": True}, spaces]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 1, "byte_fallback": True, "vocab": vocab},
    }).encode()


def main():
    numbers = [key("u8", U8, b"\1"), key("i8", I8, b"\xff"), key("u16", U16, b"\1\2"),
               key("i16", I16, b"\1\2"), key("u32", U32, b"\1\0\0\0"), key("i32", I32, b"\1\0\0\0"),
               key("f32", F32, struct.pack("<f", 1.5)), key("b", BOOL, b"\1"),
               key("u64", U64, b"\1" + b"\0" * 7), key("i64", I64, b"\xff" * 8),
               key("f64", F64, struct.pack("<d", 0.1))]
    arrays = [array("tokens", STRING, [text("a"), text("bc"), text("")]),
              array("scores", F32, [struct.pack("<f", -1.0)] * 3),
              array("types", I32, [struct.pack("<i", 1)] * 3), array("flags", BOOL, [b"\0", b"\1"]),
              array("bytes", U8, [b"a", b"b"]), array("none", U64, [])]
    write("gguf", "numbers", gguf(numbers, [], 0))
    write("gguf", "arrays_v2", gguf([key("s", STRING, text("llama"))] + arrays, [], 0, version=2))
    write("gguf", "tensors", gguf([], [tensor("a", [4, 3], 0, 0), tensor("b", [32, 2], 2, 64),
                                       tensor("c", [256], 12, 128)], 128 + 144))
    write("gguf", "aligned", gguf([key("general.alignment", U32, struct.pack("<I", 64))],
                                  [tensor("w", [32], 8, 0), tensor("x", [2, 2, 1, 1], 30, 64)], 72,
                                  alignment=64))

    def entry(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    def safetensors(header, data):
        head = json.dumps(header, separators=(",", ":")).encode()
        return struct.pack("<Q", len(head)) + head + b"\0" * data

    write("safetensors", "empty", safetensors({}, 0))
    write("safetensors", "one", safetensors({"a": entry("F32", [2], 0, 8)}, 8))
    write("safetensors", "all", safetensors(
        {"__metadata__": {"format": "pt"}, "a": entry("F32", [1, 2], 4, 12),
         "\u00e9": entry("BF16", [2], 0, 4), "s": entry("I64", [], 12, 20),
         "z": entry("U8", [0, 3], 20, 20), "i": entry("I8", [3], 20, 23)}, 23))
    write("safetensors", "index", json.dumps(
        {"metadata": {"total_size": 8}, "weight_map": {"a": "x-1.safetensors"}}).encode())
    write("tokenizer_json", "unigram", unigram())


if __name__ == "__main__":
    main()
