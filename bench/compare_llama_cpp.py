#!/usr/bin/env python3
"""Measures pianola against llama.cpp on the CPU: same file, same threads, in alternation.

    python bench/compare_llama_cpp.py --pianola build/release/pianola -m MODEL.gguf -t 2 -r 5

Needs a Python with llama-cpp-python (0.3.36 was used). Each round runs llama.cpp and pianola one
after the other, each in a process of its own and one for each depth; the order changes from round
to round. Reported are medians, and the median of the rounds' ratios. llama.cpp's figures hold no
sampling, pianola's hold greedy sampling. A run begins when the machine is quiet; one during which
other processes (or the host) took more than --max-foreign of the processors' time is made again.
"""
import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time


def run_llama(args):
    """One process: every test of llama.cpp once, as JSON on standard output."""
    import ctypes

    import llama_cpp as ll

    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
        lambda level, text, data: None)
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(args.model.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx = max(args.depths) + args.prompt + args.generate + 64
    params.n_batch = 512
    params.n_ubatch = 512
    params.n_threads = args.threads
    params.n_threads_batch = args.threads
    context = ll.llama_init_from_model(model, params)
    memory = ll.llama_get_memory(context)

    def decode(count, chunk):
        tokens = (ll.llama_token * count)(*[(i * 7919) % 4000 + 5 for i in range(count)])
        done = 0
        while done < count:
            n = min(chunk, count - done)
            part = (ll.llama_token * n)(*tokens[done:done + n])
            if ll.llama_decode(context, ll.llama_batch_get_one(part, n)) != 0:
                raise RuntimeError("llama_decode failed")
            done += n
        ll.llama_synchronize(context)

    # As pianola does: every shape once before it counts.
    decode(args.prompt or 8, 512)
    decode(2, 1)
    results, foreign = {}, []

    def measure(name, count, chunk):
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        decode(count, chunk)
        wall = time.perf_counter() - start
        results[name] = count / wall
        foreign.append((busy_seconds() - busy - time.process_time() + own) / (wall * os.cpu_count()))

    for depth in args.depths:
        suffix = f" @ d{depth}" if depth else ""
        ll.llama_memory_clear(memory, True)
        if depth:
            decode(depth, 512)
        if args.prompt and not depth:
            measure(f"pp{args.prompt}{suffix}", args.prompt, 512)
            ll.llama_memory_clear(memory, True)
        measure(f"tg{args.generate}{suffix}", args.generate, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tok_s": results, "peak_bytes": peak, "foreign": max(0.0, *foreign, 0.0),
                      "system": ll.llama_print_system_info().decode()}))


def run_pianola(args, depth):
    command = [args.pianola, "bench", "-m", args.model, "-t", str(args.threads), "-d", str(depth), "-p",
               str(0 if depth else args.prompt), "-n", str(args.generate), "-r", "1", "--json"]
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"tok_s": {r["test"]: r["tok_s"]["median"] for r in out["results"]},
            "peak_bytes": out["peak_memory_bytes"], "system": f"{out['build']}; {out['backend']}"}


def run_llama_child(args, depth):
    command = [sys.executable, __file__, "--child", "-m", args.model, "-t", str(args.threads), "-d", str(depth),
               "-p", str(args.prompt), "-n", str(args.generate)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def busy_seconds():
    """Processor time that anything on this machine took, and time the host took away (steal)."""
    with open("/proc/stat") as f:
        ticks = [int(x) for x in f.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def foreign_share(work):
    """(what work() returns, share of the processors' time that others took meanwhile)"""
    busy, start = busy_seconds(), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = work()
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result, max(0.0, busy_seconds() - busy - own) / (wall * os.cpu_count())


def quiet_run(work, limit):
    """The result of work(), begun when others leave the processors alone, made again if they did not."""
    while True:
        if foreign_share(lambda: time.sleep(3))[1] <= limit:
            result, foreign = foreign_share(work)
            foreign = result.get("foreign", foreign)  # of the timed parts alone, where that is known
            if foreign <= limit:
                print("  " + ", ".join(f"{t} {v:.1f}" for t, v in result["tok_s"].items()), file=sys.stderr)
                return {**result, "foreign": round(foreign, 4)}
            print(f"  others took {foreign:.1%} of the processors: again", file=sys.stderr)
        time.sleep(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pianola", default="build/release/pianola")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--generate", type=int, default=64)
    parser.add_argument("-d", "--depths", type=lambda s: [int(x) for x in s.split(",")], default=[0, 4096])
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--max-foreign", type=float, default=0.03, metavar="SHARE",
                        help="of the processors' time that others may take during a run")
    parser.add_argument("-o", "--output", help="write the result as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_llama(args)
        return

    runners = {"llama.cpp": run_llama_child, "pianola": run_pianola}
    runs = {name: [] for name in runners}
    table = []
    for depth in args.depths:
        for i in range(args.rounds):
            for name in list(runners)[::1 if i % 2 == 0 else -1]:
                print(f"depth {depth}, round {i + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                runs[name].append(quiet_run(lambda: runners[name](args, depth), args.max_foreign))
        of_depth = {name: runs[name][-args.rounds:] for name in runs}
        for test in of_depth["llama.cpp"][0]["tok_s"]:
            peer = [r["tok_s"][test] for r in of_depth["llama.cpp"]]
            ours = [r["tok_s"][test] for r in of_depth["pianola"]]
            table.append({"test": test, "llama_cpp": peer, "pianola": ours,
                          "ratio": statistics.median(o / p for o, p in zip(ours, peer))})
    print(f"{'test':<16} {'llama.cpp':>12} {'pianola':>12} {'ratio':>7}   (tokens/s, medians of {args.rounds})")
    for row in table:
        print(f"{row['test']:<16} {statistics.median(row['llama_cpp']):>12.1f} "
              f"{statistics.median(row['pianola']):>12.1f} {row['ratio']:>7.2f}")
    for name in runs:
        peak = max(r["peak_bytes"] for r in runs[name])
        print(f"peak memory {name}: {peak / 2**20:.0f} MiB")
    if args.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        with open(args.output, "w") as f:
            json.dump({"commit": commit, "date": time.strftime("%Y-%m-%d"), "model": os.path.basename(args.model),
                       "threads": args.threads, "machine": platform.processor() or platform.machine(),
                       "cpu": next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), ""),
                       "llama_cpp_system": runs["llama.cpp"][0]["system"], "pianola_system": runs["pianola"][0]["system"],
                       "peak_bytes": {n: max(r["peak_bytes"] for r in runs[n]) for n in runs},
                       "foreign_share": {n: [r["foreign"] for r in runs[n]] for n in runs},
                       "tests": table}, f, indent=1)


if __name__ == "__main__":
    main()
