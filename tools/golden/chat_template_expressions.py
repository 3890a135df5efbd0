#!/usr/bin/env python3
"""Writes tests/unit/chat_template/expressions.json: small templates and what jinja2 3.1.6 says.

    venv/bin/python tools/golden/chat_template_expressions.py > tests/unit/chat_template/expressions.json

The set-up is that of chat_template_oracle.py. A template that fails in jinja2 has "error" instead of
"text"; the interpreter must fail as well (with a syntax error where jinja2 has one).
"""
import json
import pathlib
import sys

import jinja2

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from chat_template_oracle import make_environment  # noqa: E402

CONTEXT = {
    "n": None, "t": True, "f": False, "i": 7, "m": -7, "x": 2.5, "s": "Hello, Wörld", "e": "",
    "l": [3, 1, 2], "w": ["b", "A", "c", "a"], "d": {"b": 1, "a": [1, {"k": "v"}], "items": 5, "_p": 6},
    "u": [{"name": "Bo", "age": 30, "tags": ["x"]}, {"name": "al", "age": 25, "tags": []},
          {"name": "Cy", "age": 30, "tags": ["y", "z"]}],
    "z": "日本🙂é", "q": "it's \"q\" \\ \n\t\x01\u00a0\u2028", "big": 9007199254740993, "tiny": 1e-7,
    "fs": ["inf", "-inf", "nan", "infinity", "1e400", "-1e400", " Inf "],
    "tree": [{"v": 1, "c": [{"v": 2, "c": [{"v": 3, "c": []}]}]}, {"v": 4, "c": []}],
}

EXPRESSIONS = """
n|t|f
n, t, f
i + 1, i - 10, i * 2, i / 2, i // 2, i % 3, i ** 2
m // 2, m % 2, m / 2, m % -3, 7 // -2, 7 % -2, -7.5 // 2, -7.5 % 2, 7.5 % -2
2 ** -1, 2 ** 0.5, 2 ** 3 ** 2, -2 ** 2, (-2) ** 2
1 / 3, 1e16, 1e15, 1e22, 1.0, 100.0, 1e-4, 1e-5, 123456789.123, 0.1 + 0.2, 1e300 * 10, 2.5e-8
1_000, 0x1F, 0b101, 0o17, 1_0.5, 1e3, 00
tiny, x, big, big + 1, big * 1.0
9223372036854775807, -9223372036854775807
1 / 0
1 // 0
1 % 0
1.5 / 0
t + t, t * 3, -t, +t, t == 1, f == 0, t / 2
"a" + "b", "a" * 3, 3 * "ab", "a" * -1, [1] * 3, (1, 2) * 2, "a" ~ 1 ~ n ~ t ~ 1.5 ~ [1, "x"]
"a" + 1
1 + "a"
[1] + [2], (1,) + (2,)
[1] + (2,)
i - "x"
not t, not e, not n, not l, not []
t and i, f and i, f or i, n or e or "z", t or nope.nope
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, 1 != 2, "a" < "b", "Z" < "a", [1, 2] < [1, 3], (1,) < (1, 2), 3 >= 3
1 < "a"
n < 1
[1] < [none]
"ell" in s, "x" not in s, 1 in l, 9 not in l, "b" in d, "zz" in d, 2 in range(3), 5 in range(0, 10, 2), 4 in range(0, 10, 2)
1 in s
1 in n
1 in 5
"x" in nope
i if t else m, i if f, i if f else m if f else 3
(i if f) is defined
l[0], l[-1], l[5], l[-4], s[0], s[-1], z[0], z[2], z[-1], z[9]
l[0:2], l[::-1], l[1:], l[:-1], l[::2], l[5:], l[-2:], l[2:0:-1], l[:100], l[-100:]
s[0:5], s[::-1], s[7:], s[:-3], z[1:3], z[::-1], z[::2], z[-2:], z[3:1:-1], e[::-1]
l[::0]
l["x":]
n[0:1]
d[0:1]
range(10)[2:8:2], range(10)[::-1]|list, range(5)[-1], range(3)[7], range(2, 20, 5)|list, range(5, 0, -2)|list
range(200000)
range(1, 2, 0)
range("x")
range(5), range(1, 5), range(0, 5, 2), range(0)|list
d.a, d["a"], d.b, d["b"], d.nope, d["nope"], d["items"], d._p, d["_p"]
d.a[1].k, d.a.1.k, d["a"][0], d.a[1]["k"]
d.nope.x
d["nope"]["x"]
nope.x
nope["x"]
nope + 1
nope
nope()
n.x, i.x, l.x, l["0"], s.x, s["0"]
n.x.y
s.upper(), s["lower"](), z.upper(), "straße".upper(), "ΑΣ".lower(), "ΑΣΑ".lower(), "İ".lower(), "ǆ".title(), "ﬁ".title(), "ŉ".upper()
s.title(), "they're bill's".title(), "HELLO wORLD".capitalize(), "hello-world foo".title(), "aBc".swapcase()
" a b ".strip(), " a ".lstrip() ~ "|", " a ".rstrip() ~ "|", "xxaxx".strip("x"), "abcab".strip("ab"), "\u2003x\u00a0".strip(), "xyx".lstrip("x"), "日a日".strip("日"), "a".strip(none)
"a,b,c".split(","), "a b  c".split(), "a,b,c".split(",", 1), " a  b ".split(none, 1), "abc".split("x"), "".split(), "".split(","), "a,b,c".rsplit(",", 1), "a b c".rsplit(none, 1), "a,b".split(sep=","), "aXbX".split("X"), "a b c".split(maxsplit=1)
"a".split("")
"a\\nb\\r\\nc\\u2028d\\x1ce".splitlines(), "a\\n\\n".splitlines(true), "".splitlines(), "a\\x0bb\\x0cc\\x85d".splitlines()
"a.b.c".partition("."), "a.b.c".rpartition("."), "abc".partition("x"), "abc".rpartition("x")
s.startswith("Hell"), s.startswith(("x", "H")), s.endswith("ld"), s.endswith(()), s.startswith("ello", 1), s.endswith("Hell", 0, 4), "".startswith("", 1), z.startswith("本", 1)
s.startswith(1)
s.startswith(["H"])
s.find("l"), s.rfind("l"), s.find("zz"), s.index("l"), s.count("l"), s.count(""), z.find("🙂"), z.rfind("é"), s.find("l", 4), s.find("l", 4, 6), s.find("", 99), s.count("l", 3), "aaa".count("aa"), z.find("é", -1)
s.index("zz")
s.replace("l", "L"), s.replace("l", "L", 1), "aaa".replace("aa", "b"), "ab".replace("", "-"), "ab".replace("", "-", 2), z.replace("本", "x")
s.replace("l")
",".join(["a", "b"]), ",".join("abc"), ",".join([]), "-".join(d)
",".join([1])
"42".isdigit(), "4.2".isdigit(), "²".isdigit(), "²".isdecimal(), "½".isnumeric(), "٣".isdigit(), "".isdigit(), "ab1".isalnum(), "ab".isalpha(), "é日".isalpha(), "a b".isalpha(), " \\t".isspace(), "".isspace(), "Ab".istitle(), "AB".isupper(), "ab".islower(), "A1".isupper(), "1".isupper(), "ab\\n".isprintable(), "".isprintable(), "abc".isascii(), z.isascii(), "AbC D".istitle()
"7".zfill(3), "-7".zfill(4), "+x".zfill(4), "é".zfill(3), "abc".zfill(2), "a".ljust(3) ~ "|", "a".rjust(3, "*"), "ab".center(5, "."), "ab".center(4) ~ "|", "abc".center(6, "-"), "a".center(4, "-")
"a".ljust(3, "xy")
"prefix-x".removeprefix("prefix-"), "x.py".removesuffix(".py"), "x".removeprefix("y")
"{} {}".format(1, "a"), "{0} {1} {0}".format(1, 2), "{a}".format(a=3), "{a.b} {b[0]} {b[k]}".format(a=d, b={"k": 1, 0: 2}), "{{}}".format(), "{:>5}|{:<5}|{:^5}|{:*^7}".format(1, "a", "b", "c"), "{:05d} {:+d} {:,} {:x} {:#x} {:b} {:o} {:X}".format(42, 5, 1234567, 255, 255, 5, 8, 255), "{:.2f} {:8.3f} {:e} {:g} {:%} {:.1%}".format(3.14159, 2.5, 12345.678, 0.0001, 0.5, 0.256), "{!r} {!s}".format("a", "b"), "{:{}}".format("a", 5), "{:.3}".format("abcdef"), "{:5}|{:5}".format("a", 1), "{:,.2f}".format(1234567.891), "{:_}".format(1234567), "{:.3}|{:.3}|{:.5}".format(12.0, 123.0, 12.5), "{}".format(n), "{:=+6d}".format(5), "{:06.2f}".format(-1.5), "{:c>4}".format(1)
"{}".format()
"{a}".format()
"{".format()
"}".format()
"{:d}".format("a")
"{} {0}".format(1)
"{:d}".format(1.5)
"%s %d %5.2f %r %% %x" % ("a", 7, 3.14159, "q", 255), "%s" % "x", "%s" % [1], "%(a)s %(b)03d" % {"a": 1, "b": 2}, "%-5s|%5s|%05d|%+d|% d" % ("a", "b", 42, 1, 2), "%e %g %G" % (12345.678, 0.00001, 1e20), "%c%c" % ("a", 98), "%.2s" % "abc", "%*d" % (5, 42), "%o %#o %#x %X" % (8, 8, 255, 255), "%i" % 3.9, "%s" % none, "%%" % ()
"%d" % "a"
"%s %s" % ("a",)
"%s" % ("a", "b")
"x" % 1
"%(a)s" % 1
"%q" % 1
[1, "a", none, true, 1.5, [], {}, (), (1,), (1, 2)], {"a": 1, 2: "b", none: 1.0, true: [1]}
"it's", ["it's", 'say "x"', 'bo\\'th"', "tab\\t", "nl\\n", "\\x7f", "é", "\\u200b", "🙂", "\\\\"], [q]
{"a": 1, "a": 2}, {1: "a", 1.0: "b", true: "c"}
{[1]: 2}
d.get("b"), d.get("zz"), d.get("zz", 4), d.keys(), d.values(), {"a": 1}.items(), {"a": 1}.keys()|list, {"a": 1}.values()|list, {}.items(), {"a": 1}.copy()
d.get()
d.get([1])
d.pop("b")
l.append(4)
d.update({})
l.append
d.pop is defined
l.index(1), l.count(1), (1, 2, 1).count(1), (1, 2).index(2), l.copy()
l.index(99)
dict(a=1, b=2), dict([("a", 1)]), dict({"x": 1}, y=2), dict()
d.__class__
"{0.__class__.__init__.__globals__}".format(s)
"{0.__class__}".format(s) is string
"".__class__.__mro__
d.__class__.x
s.__len__ is defined
i.real, x.imag, x.is_integer(), (2.0).is_integer(), i.numerator
s|length, l|count, d|length, z|length, nope|length, range(7)|length
n|length
i|length
s|upper, s|lower, s|title, s|capitalize, "foo-bar baz(qux)"|title, n|upper, i|title, "they're"|title, "ǆx"|title
"  a "|trim, "xax"|trim("x"), n|trim, i|trim, nope|trim
s|replace("l", "L"), s|replace("l", "L", 1), i|replace("7", "8"), s|replace("l", none)
l|first, l|last, s|first, s|last, []|first, []|last, d|first, d|last, nope|first, nope|last, z|first, range(3)|last
n|first
i|last
l|map("string")|last
l|sort, l|sort(reverse=true), w|sort, w|sort(case_sensitive=true), u|sort(attribute="age")|map(attribute="name")|list, u|sort(attribute="age,name")|map(attribute="name")|list, u|sort(attribute="age", reverse=true)|map(attribute="name")|list, s|sort|join
[1, "a"]|sort
[none, 1]|sort
[none]|sort, [none, none]|sort
w|unique|list, ["a", "A", "b"]|unique|list, ["a", "A"]|unique(case_sensitive=true)|list, u|unique(attribute="age")|map(attribute="name")|list, [1, 1.0, true]|unique|list
[[1]]|unique|list
l|reverse|list, s|reverse, z|reverse, l|map("string")|reverse|list, d|reverse|list
l|join, l|join(","), l|join("-", attribute="x"), u|join(", ", attribute="name"), s|join("."), d|join(","), [n, t, 1.5]|join(" "), nope|join(",")
n|join
l|list, s|list, d|list, z|list, nope|list
i|list
l|min, l|max, w|min, w|max, []|min, u|max(attribute="age"), u|map(attribute="age")|min, w|max(case_sensitive=true)
[1, "a"]|min
l|sum, [1.5, 2]|sum, []|sum, u|sum(attribute="age"), u|sum(attribute="age", start=10), [[1], [2]]|sum(start=[])
["a"]|sum
l|sum(start="")
u|map(attribute="name")|list, u|map(attribute="tags.0")|list, u|map(attribute="zz", default="-")|list, w|map("upper")|list, l|map("string")|join, ["a-b"]|map("replace", "-", "+")|list, [1.55, 2.45]|map("round", 1)|list, nope|map("upper")|list, []|map("zzz")|list, w|map("default", "x")|list
w|map|list
w|map("zzz")|list
u|map(attribute="name", zz=1)|list
u|selectattr("tags")|map(attribute="name")|list, u|selectattr("age", "equalto", 30)|map(attribute="name")|list, u|rejectattr("age", "gt", 26)|map(attribute="name")|list, u|selectattr("tags", "defined")|list|length, u|selectattr("name", "in", ["Bo"])|list|length
l|select("odd")|list, l|reject("odd")|list, l|select|list, [0, 1, ""]|select|list, [0, 1]|reject|list, l|select("gt", 1)|list, l|select("divisibleby", 3)|list, nope|select|list
l|select("zzz")|list
l|selectattr|list
l|select("odd")|length
(l|select("odd")) is iterable, (l|select("odd")) is sequence, not (l|select("zz" if f else "none"))
d|dictsort|map("first")|list, {"b": 1, "A": 2}|dictsort, {"b": 1, "A": 2}|dictsort(true), {"b": 1, "A": 2}|dictsort(by="value"), {"b": 1, "a": 2}|dictsort(reverse=true), {"b": 1}|items|list, nope|items|list
l|items|list
{1: 1, "a": 2}|dictsort
l|dictsort
5|string, 1.5|string, n|string, nope|string, l|string, s|string
"42"|int, "4.7"|int, "x"|int, "x"|int(5), "0x1F"|int(base=16), "1f"|int(0, 16), 3.9|int, -3.9|int, n|int, t|int, " 12 "|int, "1_000"|int, "1__0"|int, ""|int, "101"|int(base=2), "-5"|int, "1e3"|int, "inf"|int, l|int, "0b11"|int(0, 0), "010"|int(9, 0), "1e5"|int
nope|int
"1.5"|float, "x"|float, "x"|float(2.5), 3|float, " 1e3 "|float, "1_0.5"|float, n|float, t|float, ".5"|float, "5."|float, "1e"|float, "0x10"|float, "+1.5"|float, "1e-400"|float
fs|map("float")|list, fs|map("int", 3)|list, fs|map("float")|map("round")|list, fs|map("float")|map("tojson")|list
(fs|map("float")|first)|int
(fs|map("float")|list)[2]|int(8), (fs|map("float")|list)[2] == (fs|map("float")|list)[2], "%5.1f" % (fs|map("float")|first), "{:f}".format(fs|map("float")|first)
3.14159|round, 3.14159|round(2), 2.5|round, 3.5|round, -2.5|round, 1234.5|round(-2), 42|round, 42|round(1), 15|round(-1), 25|round(-1), -15|round(-1), 2.675|round(2), 3.2|round(0, "ceil"), 3.7|round(0, "floor"), 3.14159|round(2, "ceil"), 7|round(0, "floor"), 0.5|round|int, 1.005|round(2), 1e20|round
"a"|round
x|round(0, "zz")
-3|abs, -3.5|abs, t|abs, 3|abs
"a"|abs
"a\\nb\\n\\nc"|indent, "a\\nb"|indent(2), "a\\nb"|indent(2, true), "a\\n\\nb"|indent(2, false, true), "a\\nb"|indent("> "), ""|indent, "a\\n"|indent(2) ~ "|", "a\\nb"|indent(width=1, first=true), "\\na"|indent(2, true)
n|indent
nope|indent
"<a href='x'>&\\"</a>"|e, "<"|escape|escape, "<"|safe|escape, "<"|safe ~ "<", ("<"|safe) + "<", "<" + ("<"|safe), "%s"|safe % "<", ("<"|e) * 2, "<"|e|upper, ("a"|safe).join(["<", "b"]), ["<"|safe, "<"]|join(","), 5|safe, "<"|forceescape, ("<"|safe)|string ~ "", ("x<"|safe).replace("x", "<"), [("a"|safe)], "{}<"|safe|format, ("{}"|safe).format("<"), ("<"|safe)|tojson, ("<"|safe)[0] + "<", ("< <"|safe).split()|first + "<"
s|wordcount, "a-b c_d 日本 'x'"|wordcount, n|wordcount
"foo bar baz qux"|truncate(9), "foo bar baz qux"|truncate(9, true), "foo bar baz qux"|truncate(11), "foo bar baz qux"|truncate(11, false, "...", 0), "foobar"|truncate(4, leeway=0), z|truncate(3, true, "", 0), "abc"|truncate(3)
"abc"|truncate(1)
"ab"|center(6) ~ "|", "abc"|center(8) ~ "|", 5|center(3)
[1, 2, 3, 4, 5]|batch(2)|list, [1, 2, 3]|batch(2, "x")|list, []|batch(2)|list, [1, 2, 3, 4, 5]|slice(2)|list, [1, 2, 3, 4, 5]|slice(3, "x")|list, [1]|slice(3)|list
[1]|slice(0)|list
u|groupby("age")|length, u|groupby("age")|map(attribute="grouper")|list, u|groupby("name")|map(attribute="0")|list, (u|groupby("age")|first).list|length, [{"c": "CA"}, {"c": "ca"}, {"c": "NY"}]|groupby("c")|map("first")|list, [{"c": "CA"}, {}]|groupby("c", default="NY")|map("first")|list, [{"c": "CA"}, {"c": "ca"}]|groupby("c", case_sensitive=true)|map("first")|list
n|default("x"), nope|default("x"), e|default("x"), e|default("x", true), n|d("x", true), nope|default, nope|default(boolean=true, default_value=3), f|default(1)
"%s-%s"|format(1, 2), "%(a)s"|format(a=1), "x"|format
"%s"|format(1, a=2)
d|tojson, l|tojson, s|tojson, q|tojson, n|tojson, t|tojson, x|tojson, 1e16|tojson, tiny|tojson, z|tojson, z|tojson(ensure_ascii=true), "<>&'"|tojson, (1, 2)|tojson, {1: 2, none: 3, true: 4, 1.5: 5}|tojson, []|tojson, {}|tojson, 9223372036854775807|tojson
d|tojson(indent=2), [1, [], {}, [2]]|tojson(indent=1), {"a": {"b": []}}|tojson(indent=4), l|tojson(indent="--"), l|tojson(indent=0), l|tojson(separators=(",", ":")), d|tojson(separators=(",", ":")), l|tojson(indent=2, separators=(" ;", "=")), {"b": 1, "a": 2}|tojson(sort_keys=true), "\\x7f"|tojson, "\\x7f"|tojson(true), l|tojson(false, 2), l|tojson(indent=none)
nope|tojson
[nope]|tojson
d.items|tojson
{"a": 1}.items()|tojson
{(1, 2): 3}|tojson
{"b": 1, 2: 3}|tojson(sort_keys=true)
namespace()|tojson
s is string, n is none, i is number, t is number, i is integer, t is integer, x is float, i is float, t is boolean, 1 is boolean, t is true, f is false, 1 is true, d is mapping, l is mapping, l is sequence, s is sequence, d is sequence, i is sequence, n is sequence, nope is sequence, l is iterable, i is iterable, n is iterable, nope is iterable, s is iterable, range is callable, s is callable, nope is callable, d.get is callable
nope is defined, n is defined, nope is undefined, d.zz is defined, d.b is defined, nope is none, i is not none, i is not defined
i is odd, i is even, 9 is divisibleby 3, 9 is divisibleby(4), m is odd, 2.0 is even, "a" is lower, "A" is upper, "aB" is lower, 1 is lower
"a" is odd
1 is eq 1, 1 is equalto 2, 1 is ne 2, 1 is lt 2, 1 is le 1, 1 is gt 0, 1 is ge 2, 1 is lessthan 2, 1 is greaterthan 2, 1 is in [1, 2], 1 is not in [1, 2], "a" is in "abc", 1 is sameas 1, n is sameas none, t is sameas true, 1 is sameas true, l is sameas l, [] is sameas []
1 is in n
d.zz.y is defined if f else 1
"a" % range(3), "a" % {}, "a" % []
s is escaped, (s|e) is escaped, "upper" is filter, "zz" is filter, "odd" is test, "zz" is test
1 is zzz
i is
i is defined is defined
t and not f or f, not t == f, not (t and f), 1 + 2 * 3 - 4 / 2, (1 + 2) * 3, 2 * 3 % 4, 1 ~ (2 + 3), -1 ~ 2, -i|abs, -1.5|abs|string, "a" "b" 'c', not i is odd
1 ~ 2 + 3
1 if t else 2 if f else 3, [1 if t, 2], (1, 2)[0], [1, 2,][-1], (1,), (), {"a": 1,}.a
nope == nope, nope == none, nope != 1, nope in [nope], [nope], nope ~ "x", nope|string|length, [nope]|join("|"), nope and 1, not nope
nope < 1
-nope
nope * 2
nope % 2
"a" ~ nope
"%s" % nope
"a" % nope
namespace(a=1).a, namespace({"a": 2}).a, namespace(a=1).b, namespace(a=[1])
namespace(1)
joiner is callable, cycler("a", "b").next(), cycler(1, 2).current
cycler()
raise_exception("stop: " ~ i)
raise_exception()
strftime_now("%d %b %Y %H:%M:%S %j %A %B %y %m %% %f %p %I|%z%Z|%-d %-m %F %T")
lipsum is defined
zzz(1)
i()
s.zzz()
i|zzz
i if i|zzz else 1
i|upper(1)
s.upper(1)
range()
"a" in {"a": 1}, ("a", 1) in {"a": 1}.items(), 1 in {"a": 1}.values(), "a" in {"a": 1}.keys()
[1, 2] == [1, 2], (1, 2) == [1, 2], {"a": 1} == {"a": 1.0}, "1" == 1, range(3) == range(0, 3), [1] != [1], {"a": 1} == {"b": 1}
l == [3, 1, 2], d.a == [1, {"k": "v"}]
d|attr("b"), d|attr("items") is callable, s|attr("upper") is callable
"\\u00e9\\x41\\101\\n\\q\\'\\"\\é"
"abc"
'it\\'s'
{{}}
1 +
(1
1)
[1
{"a" 1}
{"a": }
a b
"abc
1..2
l.0, l.[0]
l.0.real
f(a=1, 2)
f(**d, 1)
range(*[1, 4])|list, dict(**{"a": 1}), range(*(2,), **{})|list
dict(a=1, **{"a": 2})
range(*1)
range(**1)
l[0, 1], d[1, 2]
l[1:2, 3]
s[1.5]
l[true], l[f], s[t]
""".strip().split("\n")

STATEMENTS = [
    "{% if t %}a{% endif %}b", "{% if f %}a{% elif i == 7 %}b{% else %}c{% endif %}",
    "{% if f %}a{% elif f %}b{% else %}c{% endif %}", "{% if nope %}a{% endif %}",
    "{% for a in l %}{{ a }},{% endfor %}", "{% for a in [] %}x{% else %}none{% endfor %}",
    "{% for a in l if a > 1 %}{{ loop.index }}/{{ loop.length }}:{{ a }} {% else %}-{% endfor %}",
    "{% for a in l if a > 9 %}x{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{% endfor %}", "{% for a, b in [(1,)] %}{% endfor %}",
    "{% for a, b in [1] %}{% endfor %}", "{% for a in n %}{% endfor %}", "{% for a in 5 %}{% endfor %}",
    "{% for a in nope %}x{% else %}y{% endfor %}", "{% for c in z %}{{ c }}|{% endfor %}",
    "{% for a in l %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}"
    "{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }}{{ loop.depth0 }} {% endfor %}",
    "{% for a in l|select('gt', 0) %}{{ loop.length }}{{ loop.last }}{{ a }} {% endfor %}",
    "{% for a in l|map('string') %}{{ loop.last }}{{ loop.length }}{{ loop.nextitem }} {% endfor %}",
    "{% for a in l %}{{ loop.cycle('x', 'y') }}{{ loop.changed(a > 1) }} {% endfor %}",
    "{% for a in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for a in l %}{{ loop.zzz }}|{% endfor %}", "{% for a in l %}{{ loop.zzz.y }}|{% endfor %}",
    "{% for a in l %}{% if a == 1 %}{% break %}{% endif %}{{ a }}{% endfor %}",
    "{% for a in l %}{% if a == 1 %}{% continue %}{% endif %}{{ a }}{% else %}e{% endfor %}",
    "{% for a in l %}{% break %}{% else %}e{% endfor %}", "{% break %}", "{% continue %}", "{% for a in l %}{% continue %}{% else %}e{% endfor %}",
    "{% macro m() %}{% break %}{% endmacro %}{% for a in l %}{{ m() }}{% endfor %}",
    "{% for a in l %}{% set x %}{% break %}{% endset %}{% endfor %}done",
    "{% for a in l %}{% for b in l %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}",
    "{% for a in l %}{% for b in range(loop.index) %}{{ b }}{% endfor %} {% endfor %}",
    "{% for x in tree recursive %}{{ loop.depth }}:{{ x.v }}{% if x.c %}[{{ loop(x.c) }}]{% endif %} {% endfor %}",
    "{% for x in tree %}{{ loop(x.c) }}{% endfor %}",
    "{% for a in l %}{{ a }}{% endfor %}{{ a }}", "{% set a = 1 %}{% for a in l %}{% endfor %}{{ a }}",
    "{% set a = 1 %}{% for b in l %}{% set a = a + b %}{{ a }} {% endfor %}{{ a }}",
    "{% set a = 1 %}{% if t %}{% set a = 2 %}{% endif %}{{ a }}",
    "{% for b in l %}{{ a }}{% set a = b %}{{ a }} {% endfor %}",
    "{% set ns = namespace(a=0) %}{% for b in l %}{% set ns.a = ns.a + b %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace() %}{% set ns.x = 1 %}{% set ns.y = [ns.x] %}{{ ns }}{{ ns.y }}{{ ns.z }}",
    "{% set d.x = 1 %}", "{% set nope.x = 1 %}", "{% set n.x = 1 %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set (a, b) = l[:2] %}{{ a }}{{ b }}", "{% set a, b = l %}",
    "{% set ns = namespace() %}{% set ns.a, b = 1, 2 %}{{ ns.a }}{{ b }}",
    "{% set a = 1, 2 %}{{ a }}", "{% set a = 1, %}{{ a }}", "{% set a %}x{{ i }}y{% endset %}{{ a }}{{ a|length }}",
    "{% set a | upper %}x{{ i }}{% endset %}{{ a }}", "{% set a | replace('x', 'y') | upper %}xz{% endset %}{{ a }}",
    "{% set a %}{% set b = 1 %}{{ b }}{% endset %}{{ a }}{{ b }}", "{% set loop = 1 %}{{ loop }}",
    "{% for a in l %}{% set loop = 1 %}{% endfor %}", "{% for loop in l %}{% endfor %}",
    "{% set true = 1 %}", "{% set 1 = 1 %}", "{% set a.b.c = 1 %}", "{% set 'a' = 1 %}", "{% set a[0] = 1 %}",
    "{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(b=4, a=5) }} {{ m() }}",
    "{% macro m(a, b=a) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }}",
    "{% macro m(a) %}{{ a.x }}{% endmacro %}{{ m() }}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{% endmacro %}{{ m(b=2) }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, k=4) }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{{ i }}{% endcall %}",
    "{% macro m() %}[{{ caller(1, 2) }}]{% endmacro %}{% call(a, b=9) m() %}{{ a }}{{ b }}{% endcall %}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{{ m() }}", "{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}",
    "{% macro m() %}{{ caller is defined }}{% if caller %}{{ caller() }}{% endif %}{% endmacro %}{{ m() }}{% call m() %}y{% endcall %}",
    "{% call 1 %}{% endcall %}", "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{{ v }}{% endmacro %}{% set v = 3 %}{{ a() }}",
    "{% macro m() %}{% set v = 1 %}{{ v }}{% endmacro %}{{ m() }}{{ v }}",
    "{% macro m(a, a) %}{% endmacro %}", "{% macro m(a=1, b) %}{% endmacro %}",
    "{% macro m(x) %}{{ x }}{% endmacro %}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}",
    "{% for a in l %}{% macro m() %}{{ a }}{% endmacro %}{{ m() }}{% endfor %}",
    "{% macro m(l) %}{% for a in l %}{{ a }}{% if a is sequence %}{{ m(a) }}{% endif %}{% endfor %}{% endmacro %}{{ m([1, [2, [3]]]) }}",
    "{% macro m(caller) %}{{ caller() }}{% endmacro %}", "{% macro m(a) %}{{ a|upper }}{% endmacro %}{{ ['x', 'y']|map('upper')|join }}{{ m('q') ~ m('r') }}",
    "{% filter upper %}a{{ s }}{% endfilter %}", "{% filter replace('a', 'b')|upper %}aXa{% endfilter %}",
    "{% filter zzz %}a{% endfilter %}", "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% set a = 5 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}", "{% with %}{% set q9 = 1 %}{{ q9 }}{% endwith %}{{ q9 }}",
    "{% generation %}a{% set b = 1 %}{{ b }}{% endgeneration %}{{ b }}", "{%- generation -%} a {%- endgeneration -%} b",
    "{% print 1, 'a' %}", "{% raw %}{{ x }}{% if %}{% endraw %}", "a {%- raw -%} {{ x }} {%- endraw -%} b",
    "{% raw %}\n  a\n{% endraw %}\nb", "  {% raw %} x {% endraw %}  y", "{% raw %}x", "{# c #}a{# {{ x }} #}b", "{# c", "a {#- c -#} b",
    "{#-#}x", "{#--#}x", "  {# c #}\n  b", "a\n  {# c #}  \nb", "{# a #}\n{# b #}\nc",
    "{% if t %}\n  a\n{% endif %}\nb\n", "  {% if t %}\n  a\n  {% endif %}\n  b", "{% if t -%}\n  a\n{%- endif %}\n\nb",
    "{%+ if t %}a{% endif %}", "  {%+ if t %}a{% endif +%}\nb", "x  {% if t %}a{% endif %}  \n y", "{{ i }}\n{{ i }}\n", "{{ i -}}\n  x", "x\n  {{- i }}",
    "  {{ i }}\n", "{{- i -}}", "{{+ i }}", "a\n\n", "a\r\nb\rc\n", "\n", "", "a\n  {%- if t %} b{% endif %}", "{% if t %}{% if t %}\nx\n{% endif %}\n{% endif %}\n",
    "\u00a0{%- if t %}x{% endif %}", "\t{% if t %}x{% endif %}", "x{% set a = 1 %}\n\ny", "{{ '{{' }}{{ '%}' }}{{ \"}}\" }}", "{{ {'a': {'b': 1}} }}", "{{ {'a': {'b': 1}}}}",
    "{% if t: %}a{% endif %}", "{% for a in l: %}{{ a }}{% endfor %}", "{% if t %}", "{% endif %}", "{% if t %}{% endfor %}", "{% zzz %}", "{% do x %}", "{{", "{%", "{{ i", "{% if", "{", "{ {", "}}", "%}", "{{ i }",
    "{{ 'a' }}{{ }}", "{% %}", "{% 1 %}", "{% if %}{% endif %}", "{% for in l %}{% endfor %}", "{% for a l %}{% endfor %}", "{% for a in %}{% endfor %}", "{% if t %}{% else %}{% elif t %}{% endif %}",
    "{% else %}", "{{ i|zzz }}", "{% if f %}{{ i|zzz }}{% endif %}", "{% if f %}{% for a in l %}{{ i|zzz }}{% endfor %}{% endif %}", "{% if t %}{{ i|zzz }}{% endif %}", "{% if f %}{{ i is zzz }}{% endif %}", "{{ 1 if t else (i|zzz) }}",
    "{% set x = cycler('a', 'b') %}{{ x.next() }}{{ x.next() }}{{ x.next() }}{{ x.current }}{{ x.reset() }}{{ x.next() }}",
    "{% set j = joiner('|') %}{% for a in l %}{{ j() }}{{ a }}{% endfor %}", "{% set j = joiner() %}{{ j() }}{{ j() }}",
    "{% set g = l|map('string') %}{{ g|list }}{{ g|list }}", "{% set g = l|select('gt', 1) %}{% if g %}yes{% endif %}{{ g|first }}{{ g|list }}",
    "{% set ns = namespace(f=true) %}{% for a in l if ns.f %}{{ a }}{% set ns.f = false %}{% endfor %}",
    "{% set ns = namespace(f=true) %}{% for a in l if ns.f %}{{ a }}{{ loop.last }}{% set ns.f = false %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for a in l %}{% set ns.l = ns.l + [a] %}{% endfor %}{{ ns.l }}",
    "{% set f = 1 %}{% macro m() %}{{ f }}{% endmacro %}{% set f = 2 %}{{ m() }}", "{% set a = b %}{{ a is defined }}", "{{ a }}{% set a = 1 %}{{ a }}", "{% set i = i + 1 %}{{ i }}",
    "{% for i in l %}{{ i }}{% endfor %}{{ i }}", "{% if t %}{% set zz = 1 %}{% endif %}{{ zz }}", "{% for a in l %}{% if loop.first %}{% set zz = 1 %}{% endif %}{{ zz }}{% endfor %}",
    "{% for a in l %}{{ loop }}{% endfor %}" if False else "{% for a in l %}{{ loop is iterable }}{{ loop is callable }}{{ loop|length }}{% endfor %}",
    "{% set x = [] %}{% set _ = x.append(1) %}", "{% set x = {} %}{{ x.update({'a': 1}) }}", "{{ '%s' % (l|join(',')) }}{{ \"a\\\nb\" }}", "{{ 'a\nb' }}", "{{ 'a\r\nb'|length }}",
    "{%- set a = 'x' -%}\n\n{{ a }}\n\n{%- set b = 1 %}\n\nz", "{% for a in l -%}\n  {{ a }}\n{%- endfor %}", "{% for a in l %}\n{{ a }}\n{% endfor %}\nend", "é{% if t %}日{% endif %}🙂{{ z }}",
    "{% for a in range(3) %}{% for b in range(3) if b == a %}{{ a }}{{ b }}{{ loop.index }}{% endfor %}{% endfor %}", "{% for x in [[1, 2], [3]] %}{{ x|join('+') }};{% endfor %}",
    "{% autoescape true %}{% endautoescape %}" if False else "{{ [1, 2, 3][1:] }}", "{{ ('a', 'b')|join('-') }}", "{{ dict(l|map('string')|map('list')|map('first')|batch(2)|list|first|list|slice(1)|list) if false else 1 }}",
]


def outcome(source):
    try:
        return {"text": make_environment().from_string(source).render(CONTEXT)}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": "syntax", "message": str(error.message)}
    except SyntaxError as error:  # Python's own, of the code that jinja2 makes
        return {"error": "syntax", "message": str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def main():
    cases = []
    for line in EXPRESSIONS:
        # A line that fails as a whole is one case; one that does not is a case for its list.
        source = "{{ [" + line + "] }}" if "," in line else "{{ " + line + " }}"
        cases.append({"source": source, **outcome(source)})
        if source.startswith("{{ [") and "error" not in cases[-1]:
            source = "{% print " + line + " %}"
            cases.append({"source": source, **outcome(source)})
    cases += [{"source": source, **outcome(source)} for source in STATEMENTS]
    seen = set()
    cases = [c for c in cases if not (c["source"] in seen or seen.add(c["source"]))]
    print('{"jinja2": "%s",\n "context": %s,\n "cases": [' % (
        jinja2.__version__, json.dumps(CONTEXT, ensure_ascii=False)))
    print(",\n".join("  " + json.dumps(c, ensure_ascii=False) for c in cases))
    print("]}")


if __name__ == "__main__":
    main()
