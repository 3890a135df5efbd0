#!/usr/bin/env python3
"""Decode and prefill on one GPU, beside the peers that are there; run by scripts/gpu-bench.

Random checkpoints of well-known shapes are made in place. Before anything is timed, pianola's
log-probabilities are held against transformers in float32 on the same weights. Then pianola and the
peers take turns, and medians are reported: ms per token at batch 1, greedy, sampling included, and
the share of the read bandwidth measured on the same machine. Peers: transformers with its static
cache and torch.compile, and with its dynamic cache; llama.cpp when a llama-bench and GGUF files are
given.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

import torch

import gpu_checkpoints

BF16_BYTES = {"llama-3.2-1b": 2.472e9, "llama-3.1-8b": 15.01e9, "qwen3-0.6b": 1.192e9}


def read_bandwidth():
    """Bytes a second of a reduction over 4 GB, the best of several."""
    x = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    best = 0
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x.sum()
        end.record()
        end.synchronize()
        best = max(best, x.numel() * 4 / (begin.elapsed_time(end) / 1e3))
    return best


def pianola(arguments, command, *flags):
    result = subprocess.run([arguments.pianola, command, "--backend", "cuda", *map(str, flags)],
                            capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"pianola {command} {flags}: {result.stderr.strip()}")
    return json.loads(result.stdout)


def bench(arguments, folder, *flags):
    result = pianola(arguments, "bench", "-m", folder, "--cache-type", "bf16", "--no-bandwidth", "--json",
                     "-r", arguments.repetitions, *flags)
    return result["results"]


def check(arguments, folder, tokens=96):
    """The largest difference to transformers in float32, over log-probabilities of random tokens."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
    with torch.no_grad():
        logits = model(ids.cuda()).logits[0].double()
    want = torch.log_softmax(logits, -1)[torch.arange(tokens - 1), ids[0, 1:].cuda()]
    del model
    torch.cuda.empty_cache()
    text = " ".join(map(str, ids[0].tolist()))
    worst = {}
    for name, flags in {"decode": ("-b", "32"), "prefill": ("-b", "128")}.items():
        got = pianola(arguments, "score", "-m", folder, "--cache-type", "f32", "--json", "--ids",
                      "-c", "256", *flags, text)["logprobs"]
        worst[name] = (torch.tensor(got).double() - want.cpu()).abs().max().item()
    return worst


class Transformers:
    """Greedy decoding of one sequence; ms per token as the slope between two lengths."""

    def __init__(self, folder, static):
        from transformers import AutoModelForCausalLM
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
        self.static = static
        self.ids = torch.arange(8, device="cuda")[None] + 100
        self.run(8)

    def run(self, tokens):
        keys = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
                    attention_mask=torch.ones_like(self.ids))
        if self.static:
            keys["cache_implementation"] = "static"
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.model.generate(self.ids, **keys)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def ms_per_token(self, short=32, long=160):
        return (self.run(long) - self.run(short)) * 1e3 / (long - short)


def llama_cpp(binary, gguf, repetitions):
    result = subprocess.run([binary, "-m", gguf, "-ngl", "99", "-fa", "1", "-p", "0", "-n", "128", "-r",
                             str(repetitions), "-o", "json"], capture_output=True, text=True, check=True)
    return 1e3 / json.loads(result.stdout)[0]["avg_ts"]


def measure(arguments, shape, folder, bandwidth):
    row = {"shape": shape}
    row["difference"] = check(arguments, folder)
    print(f"{shape}: largest difference of a log-probability to transformers in float32: "
          + ", ".join(f"{k} {v:.2e}" for k, v in row["difference"].items()), flush=True)
    peers = {}
    if "static" in arguments.peers:
        peers["transformers static + compile"] = Transformers(folder, True)
    if "eager" in arguments.peers:
        peers["transformers eager"] = Transformers(folder, False)
    times = {name: [] for name in ["pianola", *peers]}
    for _ in range(arguments.rounds):
        result = bench(arguments, folder, "-p", 0, "-n", 256)
        times["pianola"].append(1e3 / result[0]["tok_s"]["median"])
        for name, peer in peers.items():
            times[name].append(peer.ms_per_token())
    gguf = arguments.gguf.get(shape)
    if arguments.llama_bench and gguf:
        times["llama.cpp"] = [llama_cpp(arguments.llama_bench, gguf, arguments.repetitions)]
    row["ms"] = {name: statistics.median(t) for name, t in times.items()}
    row["share"] = {name: BF16_BYTES[shape] / (ms / 1e3) / bandwidth for name, ms in row["ms"].items()}
    for name, ms in row["ms"].items():
        print(f"  {name:30} {ms:8.3f} ms  {1e3 / ms:8.1f} tok/s  {100 * row['share'][name]:5.1f} % of read "
              f"bandwidth", flush=True)
    del peers
    torch.cuda.empty_cache()
    extra = {}
    for flags in arguments.extra:
        for r in bench(arguments, folder, *flags):
            extra[r["test"]] = r["tok_s"]["median"]
            print(f"  {r['test']:30} {r['tok_s']['median']:12.1f} tok/s", flush=True)
    row["extra_tok_s"] = extra
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["qwen3-0.6b", "llama-3.2-1b"])
    parser.add_argument("--pianola", required=True)
    parser.add_argument("--work", default="/tmp/pianola-bench", help="folder for checkpoints")
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", default="static,eager", type=lambda s: s.split(",") if s else [])
    parser.add_argument("--llama-bench")
    parser.add_argument("--gguf", default={}, type=json.loads, help='{"shape": "file.gguf"}')
    parser.add_argument("--no-extra", action="store_true")
    arguments = parser.parse_args()
    arguments.extra = [] if arguments.no_extra else [
        ("-p", 0, "-n", 128, "-d", "512,16384"), ("-p", "4096", "-n", 0, "-b", 4096),
        ("-p", 0, "-n", 64, "-d", 512, "--rows", 8), ("-p", 0, "-n", 64, "-d", 512, "--rows", 32)]
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)
    report = {"gpu": torch.cuda.get_device_name(), "read_bandwidth_gb_s": bandwidth / 1e9,
              "torch": torch.__version__, "commit": arguments.commit,
              "date": time.strftime("%Y-%m-%d"), "rows": []}
    for shape in arguments.shapes:
        folder = pathlib.Path(arguments.work) / shape
        if not (folder / "config.json").exists():
            gpu_checkpoints.make(shape, folder)
        report["rows"].append(measure(arguments, shape, str(folder), bandwidth))
        pathlib.Path(arguments.out).write_text(json.dumps(report, indent=1))
    os.sync()


if __name__ == "__main__":
    main()
