#!/usr/bin/env python3
"""What the reference tokenizers say of unigram models: ids for tests/unit/tokenizer/oracle_test.cc.

Needs Python with `tokenizers`, `gguf`, `sentencepiece` and `protobuf`. SentencePiece trains small models on the
corpus, with its own normalisation (a precompiled charsmap), with and without byte fallback; each is written as a
tokenizer.json, with the ids of the `tokenizers` wheel, and as a GGUF file, with the ids of the wheel's model for the
text as SentencePiece normalises it. (SentencePiece adds scores in f32, the wheel and llama.cpp in f64: where spellings
are worth the same they choose otherwise.)

    python tools/golden/tokenizer_unigram_oracle.py           # into $PIANOLA_CACHE/tokenizer-oracle
"""

import base64
import io
import json
import os
import sys

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb2
from tokenizers import Tokenizer, models

from tokenizer_corpus import corpus, hostile, source_code, translations, write_ids, write_texts
from tokenizer_oracle import CACHE, CONTROL, UNKNOWN, sequence, write_oracle

VERSION = "1"
FOLDER = os.path.join(CACHE, "tokenizer-oracle")
EXTRA = ["<extra_id_0>", "<extra_id_1>"]


def train(byte_fallback):
    model = io.BytesIO()
    lines = [line for text in translations() + source_code() for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:: max(1, len(lines) // 20_000)]),
        model_writer=model,
        model_type="unigram",
        vocab_size=6000,
        character_coverage=0.995,  # leaves characters unknown
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        control_symbols=EXTRA,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        num_threads=2,
        minloglevel=2,
    )
    return pb2.ModelProto.FromString(model.getvalue())


def special_tokens(proto):
    return [
        {
            "id": i,
            "content": piece.piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, piece in enumerate(proto.pieces)
        if piece.type in (UNKNOWN, CONTROL)
    ]


def document(proto, old):
    """As transformers converts a T5 model; `old`: as it did before prepend_scheme."""
    charsmap = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    metaspace = {"type": "Metaspace", "replacement": "\u2581"}
    if old:
        normalizer = precompiled
        metaspace["add_prefix_space"] = True
        pre_tokenizer = sequence("pretokenizers", [{"type": "WhitespaceSplit"}, metaspace])
    else:
        spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
        strip = {"type": "Strip", "strip_left": False, "strip_right": True}
        normalizer = sequence("normalizers", [precompiled, strip, spaces])
        metaspace.update(prepend_scheme="always", split=True)
        pre_tokenizer = metaspace
    vocab = [[p.piece, 0.0 if p.type in (UNKNOWN, CONTROL) else p.score] for p in proto.pieces]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    piece = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens(proto),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [piece("A"), end],
            "pair": [piece("A"), end, piece("B"), end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": vocab,
            "byte_fallback": proto.trainer_spec.byte_fallback,
        },
    }


def write_gguf(path, proto):
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([p.piece for p in proto.pieces])
    writer.add_token_scores([p.score for p in proto.pieces])
    writer.add_token_types([p.type for p in proto.pieces])
    spec = proto.normalizer_spec
    writer.add_add_space_prefix(spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(spec.precompiled_charsmap)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary_without_control(proto):
    """No text spells a control token: it has another name here."""
    hidden = lambda i, piece: f"\x00{i}\x00" if piece.type in (UNKNOWN, CONTROL) else piece.piece
    return [(hidden(i, piece), piece.score) for i, piece in enumerate(proto.pieces)]


def write_plain(name, source, proto):
    """Hostile texts as text."""
    source["model"]["vocab"] = vocabulary_without_control(proto)
    tokenizer = Tokenizer.from_str(json.dumps({**source, "added_tokens": [], "post_processor": None}))
    specials = [token["content"] for token in source["added_tokens"]]
    texts = hostile(specials[:24] + specials[-2:])  # as write_oracle() has them
    write_ids(os.path.join(FOLDER, name + ".hostile.plain.ids"), [tokenizer.encode(text).ids for text in texts])


def write_sentencepiece(name, proto, texts):
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    path = lambda kind: os.path.join(FOLDER, f"{name}.{kind}")
    write_gguf(path("gguf"), proto)
    model = models.Unigram(vocabulary_without_control(proto), 2, proto.trainer_spec.byte_fallback)
    wheel = Tokenizer(model)

    def encode(text):
        if "<0x" in text:  # a byte token, which the wheel takes for text
            return processor.encode(text)
        return wheel.encode(processor.normalize(text)).ids

    write_ids(path("sentencepiece.ids"), [encode(text) for text in texts])
    odd = hostile(["</s>", *EXTRA])
    write_texts(path("sentencepiece.texts"), odd)
    write_ids(path("sentencepiece.odd.ids"), [encode(text) for text in odd])


def main():
    os.makedirs(FOLDER, exist_ok=True)
    done = os.path.join(FOLDER, "unigram.version")
    if os.path.exists(done) and open(done).read() == VERSION and "--force" not in sys.argv:
        print(f"{done} is there already (--force makes all again)")
        return
    texts = corpus()
    write_texts(os.path.join(FOLDER, "corpus.texts"), texts)
    for name, byte_fallback in (("unigram", False), ("unigram-bytes", True)):
        proto = train(byte_fallback)
        print(f"{name}: {len(proto.pieces)} pieces")
        write_sentencepiece(name, proto, texts)
        # After SentencePiece has read its own: other numbers of spaces, and none in front.
        proto.normalizer_spec.remove_extra_whitespaces = False
        write_sentencepiece(name + "-spaces", proto, texts)
        for key, old in ((name, False), (name + "-old", True)):
            source = document(proto, old)
            print(f"{key}: {write_oracle(FOLDER, key, source, texts)} ids")
            write_plain(key, source, proto)
    with open(done, "w") as out:
        out.write(VERSION)


if __name__ == "__main__":
    main()
