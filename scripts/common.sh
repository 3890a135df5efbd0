# shellcheck shell=bash disable=SC2034  # the lists are for the scripts that source this
# What scripts/ and .ci/run share: where things are, messages, Debian packages. Sourced, not run.
#
#   . "$(dirname "${BASH_SOURCE[0]}")/common.sh"
#   need_packages "${build_packages[@]}"
#
# Installing asks nothing, and nothing is done where everything is there already.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${PIANOLA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pianola}
export PIANOLA_CACHE=$cache
# Several builds share objects; the size keeps every configuration that CI builds.
export CCACHE_DIR=${CCACHE_DIR:-$cache/ccache}
export CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-3G}
# Paths count from here, so that a clone in another folder finds the release objects of this one.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$root}

# Everything the default build needs, then what each further step adds to it.
build_packages=(g++ cmake ninja-build libfmt-dev libboost-json1.81-dev libutf8proc-dev libcli11-dev)
# The packages from PyPI are brought by pip's own client.
fetch_packages=(ca-certificates python3 python3-pip python3-venv)
# iso-codes: text in about 150 languages for the tokenizer tests.
test_packages=(ccache git iso-codes libgtest-dev libgmock-dev librapidcheck-dev pkg-config)
# clang, its tools and libFuzzer at version 19: version 14 rejects C++20 that g++ 12 accepts.
ci_packages=(clang-19 clang-format-19 clang-tidy-19 libclang-rt-19-dev llvm-19 shellcheck)

say() { printf '%s\n' "$*" >&2; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Prints the packages of its arguments that are not installed.
missing_packages() {
  local installed
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null |
    sed -n 's/^installed //p' || true)
  local package
  for package in "$@"; do
    grep -qxF -- "$package" <<<"$installed" || printf '%s\n' "$package"
  done
}

# need_packages PACKAGE...: installs those that are missing, as root or through sudo.
need_packages() {
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    say "note: no apt here, so nothing is installed; the build needs the equivalent of: $*"
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "packages are missing and there is neither root nor sudo: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "Installing Debian packages: ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq
    -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0)
  local log
  log=$(mktemp)
  if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } \
    </dev/null >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    rm -f "$log"
    die "apt could not install: ${missing[*]}"
  fi
  rm -f "$log"
}

# The value of a variable in the CMake cache of a build folder; empty without one.
cmake_cache_value() {
  sed -n "s/^$2:[A-Z]*=//p" "$1/CMakeCache.txt" 2>/dev/null || true
}

# configure PRESET VARIABLE=VALUE...: configures build/PRESET, unless that was done already with the
# same values. What changes later (a new file, a CMakeLists.txt) the build itself notices.
configure() {
  local preset=$1 folder=$root/build/$1 pair fresh=1 definitions=()
  shift
  [[ -f $folder/build.ninja && $(cmake_cache_value "$folder" CMAKE_HOME_DIRECTORY) == "$root" ]] ||
    fresh=0
  for pair in "$@"; do
    definitions+=("-D$pair")
    [[ $(cmake_cache_value "$folder" "${pair%%=*}") == "${pair#*=}" ]] || fresh=0
  done
  ((fresh)) && return
  # A folder that was copied from elsewhere holds the paths of that place.
  if [[ -f $folder/CMakeCache.txt &&
    $(cmake_cache_value "$folder" CMAKE_HOME_DIRECTORY) != "$root" ]]; then
    rm -rf -- "$folder"
  fi
  say "Configuring build/$preset"
  mkdir -p "$folder"
  (cd "$root" && cmake --preset "$preset" "${definitions[@]}") >"$folder/configure.log" 2>&1 || {
    cat "$folder/configure.log" >&2
    die "configuring build/$preset failed"
  }
}
