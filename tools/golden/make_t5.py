"""Makes tests/models/t5/<case>/: tiny checkpoints with an encoder, and what transformers computes.

    python tools/golden/make_t5.py [--only gated]

Each case folder holds
    golden.json   tokens of the inputs and of the rows decoded behind them, versions, seed, and by
                  how much transformers in bfloat16 differs from what the other files hold
    logits.f32    little-endian float32 [positions of all rows in order, vocab_size]
    cross.f32     float32 keys, then values, of every decoder layer's cross attention, for each input:
                  [inputs][layers][2][tokens of the input, heads * d_kv]
    hf/           the Hugging Face folder
    f16.gguf      of a case that llama.cpp's conventions can say: the same weights
    ../buckets.json  buckets of relative positions, as T5Attention computes them

Weights are as those of make_checkpoints.py. Every row is computed alone, without padding, from the
checkpoint as transformers reads it back.
"""

import argparse
import copy
import json
import platform

import gguf
import numpy as np
import torch
import transformers
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from make_checkpoints import OUT, SEED, grid_weight, rms_difference, rng_for

FOLDER = OUT / "t5"

# name: (fields, dtype of the file, lengths of the inputs, (input, length) of each row).
CASES = {
    # As Flan-T5: a gate, a head of its own, nothing scaled. Inputs and rows pass the distance from
    # which on there is one bucket; two rows go on from one input.
    "gated": (
        dict(vocab_size=128, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=3,
             num_heads=4, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "float16",
        (150, 17),
        ((0, 140), (1, 21), (0, 19)),
    ),
    # As T5 1.0: relu, the embedding as head, and its input scaled; few buckets.
    "relu": (
        dict(vocab_size=128, d_model=64, d_kv=24, d_ff=96, num_layers=3, num_decoder_layers=2,
             num_heads=4, feed_forward_proj="relu", relative_attention_num_buckets=8,
             relative_attention_max_distance=20),
        "float16",
        (66, 64, 1),
        ((0, 70), (1, 33), (2, 12)),
    ),
}  # fmt: skip

SHARED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def make_weights(model, case, own_head):
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name in SHARED or (name == "lm_head.weight" and not own_head):
            continue
        rng = rng_for(f"t5/{case}", name)
        shape = tuple(parameter.shape)
        if name.endswith("norm.weight"):
            tensors[name] = (rng.integers(64, 192, size=shape) / 128.0).astype(np.float32)
        else:
            # The bias is added to scores of some units: as large as they are.
            factor = 8 if "relative_attention_bias" in name else 1
            tensors[name] = grid_weight(rng, shape, 8) * factor
    return tensors


def load_weights(model, tensors):
    if "lm_head.weight" in tensors:
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - set(SHARED) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")


@torch.no_grad()
def logits_of(model, inputs, rows):
    return [
        model(input_ids=torch.tensor([inputs[i]]), decoder_input_ids=torch.tensor([row]))
        .logits[0].double().numpy()
        for i, row in rows
    ]  # fmt: skip


@torch.no_grad()
def cross_of(model, tokens):
    encoded = model.encoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    parts = []
    for block in model.decoder.block:
        attention = block.layer[1].EncDecAttention
        parts += [part(encoded).double().numpy().ravel() for part in (attention.k, attention.v)]
    return np.concatenate(parts)


def check_sensitivity(model, tensors, inputs, rows, reference):
    """As in make_checkpoints.py, for each kind of tensor of each stack."""
    least = (np.inf, "")
    for kind in sorted({(name.split(".")[0], name.split(".", 3)[-1]) for name in tensors}):
        changed = {}
        for name, array in tensors.items():
            hit = (name.split(".")[0], name.split(".", 3)[-1]) == kind
            neutral = np.ones_like(array) if "norm" in name else np.zeros_like(array)
            changed[name] = neutral if hit else array
        load_weights(model, changed)
        got = logits_of(model, inputs, rows)
        least = min(least, (max(float(np.abs(a - b).max()) for a, b in zip(got, reference, strict=True)), ".".join(kind)))
    load_weights(model, tensors)
    return least


def write_hf(folder, model, dtype, own_head):
    kept = copy.deepcopy(model).to(getattr(torch, dtype))
    kept.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["decoder_start_token_id"] = 0
    if own_head:  # as transformers 4 wrote it, and the files that people have
        config["tie_word_embeddings"] = False
        for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act"):
            config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


# Of llama.cpp's converter: dec.blk.N.* and enc.blk.N.*.
GGUF_NAMES = {
    "layer.0.layer_norm": "attn_norm",
    "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k",
    "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_o",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.1.EncDecAttention.q": "cross_attn_q",
    "layer.1.EncDecAttention.k": "cross_attn_k",
    "layer.1.EncDecAttention.v": "cross_attn_v",
    "layer.1.EncDecAttention.o": "cross_attn_o",
    "DenseReluDense.wi_0": "ffn_gate",
    "DenseReluDense.wi_1": "ffn_up",
    "DenseReluDense.wo": "ffn_down",
}


def gguf_name(name):
    top = {"shared.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    stack = name[:3]
    if name.endswith("final_layer_norm.weight"):
        return f"{stack}.output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    stem = rest.removesuffix(".weight")
    mlp = "layer.2" if stack == "dec" else "layer.1"
    if stem == f"{mlp}.layer_norm":
        short = "ffn_norm"
    elif stem == "layer.1.layer_norm":
        short = "cross_attn_norm"
    else:
        short = GGUF_NAMES[stem.removeprefix(f"{mlp}.") if "Dense" in stem else stem]
    return f"{stack}.blk.{layer}.{short}.weight"


def write_gguf(path, fields, tensors):
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(512)
    writer.add_embedding_length(fields["d_model"])
    writer.add_feed_forward_length(fields["d_ff"])
    writer.add_block_count(fields["num_layers"])
    writer.add_decoder_block_count(fields["num_decoder_layers"])
    writer.add_head_count(fields["num_heads"])
    writer.add_key_length(fields["d_kv"])
    writer.add_value_length(fields["d_kv"])
    writer.add_layer_norm_eps(1e-6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_relative_attn_buckets_count(32)
    writer.add_decoder_start_token_id(0)
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    for name, array in tensors.items():
        plain = array.ndim == 1 or "relative_attention_bias" in name
        writer.add_tensor(gguf_name(name), array if plain else array.astype(np.float16))
    # What the first T5 files carry and nothing reads.
    writer.add_tensor("dec.blk.0.cross_attn_rel_b.weight",
                      np.ones((32, fields["num_heads"]), dtype=np.float32))  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def answers_of(model, inputs, count=24):
    """Greedy answers, and the least by which a token was ahead of the next."""
    answers, margin = [], np.inf
    for tokens in inputs:
        answer = [0]
        while len(answer) <= count and answer[-1] != 1:
            logits = model(
                input_ids=torch.tensor([tokens]), decoder_input_ids=torch.tensor([answer])
            ).logits[0, -1]
            best = torch.topk(logits, 2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            answer.append(int(best.indices[0]))
        answers.append(answer[1:])
    return answers, margin


def make_case(case):
    fields, dtype, input_lengths, row_lengths = CASES[case]
    own_head = not fields.get("tie_word_embeddings", True)
    torch.manual_seed(SEED)
    model = T5ForConditionalGeneration(T5Config(**fields)).eval()
    tensors = make_weights(model, case, own_head)
    load_weights(model, tensors)
    folder = FOLDER / case
    folder.mkdir(parents=True, exist_ok=True)
    write_hf(folder / "hf", model, dtype, own_head)
    model = T5ForConditionalGeneration.from_pretrained(
        folder / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tied = model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()
    if tied == own_head or model.config.scale_decoder_outputs == own_head:
        raise ValueError("the checkpoint does not read back as it was made")

    if own_head:
        write_gguf(folder / "f16.gguf", fields, tensors)
    rng = rng_for(f"t5/{case}", "tokens")
    vocab = fields["vocab_size"]
    inputs = [rng.integers(0, vocab, size=n).tolist() for n in input_lengths]
    rows = [(i, [0, *rng.integers(0, vocab, size=n - 1).tolist()]) for i, n in row_lengths]
    logits = logits_of(model, inputs, rows)
    np.concatenate(logits).astype("<f4").tofile(folder / "logits.f32")
    cross = [cross_of(model, tokens) for tokens in inputs]
    np.concatenate(cross).astype("<f4").tofile(folder / "cross.f32")
    exact = logits_of(copy.deepcopy(model).double(), inputs, rows)
    rounded = copy.deepcopy(model).bfloat16()
    answers, margin = answers_of(model, inputs)
    golden = {
        "script": "tools/golden/make_t5.py",
        "seed": SEED,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "case": f"t5/{case}",
        "vocab_size": vocab,
        "heads": fields["num_heads"],
        "head_dim": fields["d_kv"],
        "decoder_layers": fields["num_decoder_layers"],
        "inputs": inputs,
        "rows": [{"input": i, "tokens": row} for i, row in rows],
        "answers": answers,
        "answers_margin": margin,
        "oracle_noise": max(float(np.abs(a - b).max()) for a, b in zip(logits, exact)),
        "bfloat16_rms": rms_difference(logits_of(rounded, inputs, rows), logits),
        "bfloat16_cross_rms": rms_difference([cross_of(rounded, x) for x in inputs], cross),
        "largest_logit": max(float(np.abs(a).max()) for a in logits),
    }
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    least = check_sensitivity(model, tensors, inputs, rows, logits)
    print(
        f"{case:6} margin {margin:.1e} noise {golden['oracle_noise']:.1e} "
        f"largest {golden['largest_logit']:.2f} least sensitive {least[1]} {least[0]:.2f}"
    )


def make_buckets():
    """Where the bucket changes along offsets of -600 to 600: [offset, bucket] of each change."""
    offsets = torch.arange(-600, 601)
    cases = []
    for both in (False, True):
        for buckets, distance in ((32, 128), (8, 20), (16, 64), (64, 256), (4, 5), (32, 100)):
            of = T5Attention._relative_position_bucket(offsets, both, buckets, distance).tolist()
            changes = [[int(offsets[0]), of[0]]]
            for offset, bucket in zip(offsets.tolist()[1:], of[1:]):
                if bucket != changes[-1][1]:
                    changes.append([offset, bucket])
            cases.append(dict(both_directions=both, buckets=buckets, max_distance=distance,
                              changes=changes))  # fmt: skip
    text = json.dumps({"script": "tools/golden/make_t5.py", "end": 600, "cases": cases})
    (FOLDER / "buckets.json").write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one case")
    arguments = parser.parse_args()
    for case in [arguments.only] if arguments.only else CASES:
        make_case(case)
    make_buckets()


if __name__ == "__main__":
    main()
