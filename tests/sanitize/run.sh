#!/usr/bin/env bash
# Runs the stress tests under AddressSanitizer and ThreadSanitizer.
#
#   tests/sanitize/run.sh           about ten minutes
#   tests/sanitize/run.sh --short   two to three
#
# Silence alone proves nothing: the wrong file may have been loaded, or one without instrumentation.
# So each job first builds a copy of the sources with a planted bug, in the same way, and fails
# unless the sanitizer reports that bug. Everything is built in target/sanitize.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Operations of each thread.
case ${1:-} in
  '') ASAN_OPS=1000000 TSAN_OPS=1000000 PYTHON_OPS=250000 ;;
  --short) ASAN_OPS=100000 TSAN_OPS=100000 PYTHON_OPS=20000 ;;
  *) echo "usage: $0 [--short]" >&2 && exit 2 ;;
esac
# An operation on blocks is some of those on a layer cache.
BLOCKS_SHARE=2
# A planted bug is reported long before the end, and ends the run.
PLANTED_OPS=20000

HERE=tests/sanitize
OUT=$PWD/target/sanitize
VENV=$OUT/venv
TARGET=$(rustc -vV | sed -n 's/^host: //p')

# The exit code after a report, unlike that of a failed test.
REPORTED=66

fail() {
  echo "tests/sanitize/run.sh: $*" >&2
  exit 1
}

# What is needed beside Rust and Python

newest() { # PATTERN
  compgen -G "$1" | sort --version-sort | tail -n 1
}

find_tools() {
  MISSING=()
  RUNTIME=$(newest "/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.tsan-${TARGET%%-*}.so") ||
    MISSING+=(libclang-rt-22-dev)
  SYMBOLIZER=$(command -v llvm-symbolizer || newest '/usr/bin/llvm-symbolizer-*') ||
    MISSING+=(llvm-22)
  command -v patch >/dev/null || MISSING+=(patch)
}

install_tools() {
  if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    fail "please install ${MISSING[*]} (another version of LLVM may do)"
  fi
  echo "== Installing ${MISSING[*]}"
  apt-get update -qq
  apt-get install -qq --no-install-recommends "${MISSING[@]}" >/dev/null
  find_tools
  [[ ${#MISSING[@]} == 0 ]] || fail "${MISSING[*]} can not be found after the installation"
}

make_venv() {
  [[ -x $VENV/bin/python ]] || "${PYTHON:-python3}" -m venv "$VENV"
  "$VENV/bin/python" -c 'import numpy' 2>/dev/null || "$VENV/bin/pip" install --quiet 'numpy>=2.1'
}

# Before anything is built, for a patch that the sources have outgrown would be found minutes later.
check_patches() {
  local patch
  for patch in "$HERE"/planted-*.patch; do
    patch --dry-run --quiet --strip=1 <"$patch" >/dev/null || fail "$patch does not apply any more"
  done
}

# Building

# Copies the sources to src-TREE, with the planted bug of that name unless TREE is "real". A copy
# that would be the same as the last one is not made, so that cargo has nothing to build.
copy_sources() { # TREE
  local tree=$OUT/src-$1 fresh=$OUT/src-new plant=$HERE/planted-$1.patch sum
  rm -rf "$fresh"
  mkdir -p "$fresh/tests" "$fresh/kvspan"
  cp -R Cargo.lock README.md src "$fresh"
  cp -R tests/stress.rs tests/stress_blocks.rs tests/common "$fresh/tests"
  cp python/kvspan/*.py "$fresh/kvspan"
  # Without the development dependencies, which take minutes to build and are not needed for the
  # stress test, and as a workspace of its own, so that cargo does not look at the folders above.
  sed -e '/^\[dev-dependencies\]/,/^$/d' -e '/^\[\[bench\]\]/,/^$/d' -e '$a [workspace]' \
    Cargo.toml >"$fresh/Cargo.toml"
  if [[ $1 != real ]]; then
    patch --quiet --strip=1 --directory="$fresh" <"$plant" || fail "$plant does not apply any more"
  fi
  sum=$(cd "$fresh" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
  if [[ $sum != "$(cat "$tree.sum" 2>/dev/null)" ]]; then
    rm -rf "$tree" "$tree.sum"
    mv "$fresh" "$tree"
    echo "$sum" >"$tree.sum"
  fi
}

# Runs cargo in src-TREE, with a target folder of its own. A new one begins with the dependencies
# that the same job has built for another tree.
cargo_in() { # JOB TREE FLAGS ARGUMENTS...
  local target=$OUT/build-$1-$2 seed
  # The flags are unstable, but the compiler need not be. With --target, build scripts and macros
  # are free of them.
  (
    cd "$OUT/src-$2"
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS=$3 CARGO_TARGET_DIR=$target
    export CARGO_PROFILE_DEV_OPT_LEVEL=1 # with full debug information: suppressions go by names
    export PYO3_PYTHON=$VENV/bin/python PYO3_BUILD_EXTENSION_MODULE=1
    if [[ ! -d $target ]] && seed=$(newest "$OUT/build-$1-*"); then
      cp -R --preserve=timestamps "$seed" "$target"
      # To cargo, the other tree's kvspan is this one if its files are older.
      cargo clean --quiet --package kvspan --target "$TARGET"
    fi
    cargo "${@:4}" --quiet --target "$TARGET"
  )
}

# Builds a stress test, and prints its path.
build_stress() { # JOB TREE FLAGS TEST
  copy_sources "$2"
  cargo_in "${@:1:3}" test --no-run --test "$4" --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

# Makes the folder package-TREE with the Python package.
build_package() { # JOB TREE FLAGS
  local package=$OUT/package-$2
  copy_sources "$2"
  cargo_in "$@" build --lib --features python
  # No other module can be in the folder that is searched first.
  rm -rf "$package"
  mkdir "$package"
  cp -R "$OUT/src-$2/kvspan" "$package"
  cp "$OUT/build-$1-$2/$TARGET/debug/libkvspan.so" "$package/kvspan/_kvspan.abi3.so"
}

# Running

# Runs a command; its output is in LOG, its exit code in STATUS, its time in SECONDS.
run() { # NAME COMMAND...
  LOG=$OUT/$1.log STATUS=0 SECONDS=0
  timeout 30m "${@:2}" >"$LOG" 2>&1 || STATUS=$?
}

in_log() { # PATTERN
  grep --text --quiet --extended-regexp "$1" "$LOG"
}

fail_with_log() { # MESSAGE
  head -n 60 "$LOG" | cut -c 1-160 >&2
  fail "$1; the exit code is $STATUS, all output is in $LOG"
}

# Requires a report, of what the cache does with its memory, or NumPy with memory of the cache's.
must_report() { # REPORT
  local place='kvspan::memory::|_multiarray_umath'
  if [[ $STATUS != "$REPORTED" ]] || ! in_log "$1" || ! in_log "$place"; then
    fail_with_log "the planted bug was not reported as '$1'"
  fi
  echo "   with a planted bug: $1"
}

# Requires that all went well, as a line that matches SUCCESS says, and that there is no report.
must_be_silent() { # SUCCESS OPERATIONS
  if [[ $STATUS != 0 ]] || ! in_log "$1" || in_log '(WARNING|ERROR): [A-Za-z]+Sanitizer'; then
    fail_with_log "the stress test failed, or there are reports"
  fi
  echo "   as it is: no report in $2 operations of each thread ($SECONDS s)"
}

# Requires that a file is instrumented, and built from src-TREE.
check_binary() { # FILE SYMBOL TREE
  local text
  for text in "$2" "$OUT/src-$3"; do
    grep --quiet --text --fixed-strings "$text" "$1" || fail "$1 is the wrong file: it has no $text"
  done
}

# Jobs. Each plants its own bug first.

must_find() { # JOB FLAGS SYMBOL TEST PLANT REPORT
  local binary
  binary=$(build_stress "$1" "$5" "$2" "$4")
  check_binary "$binary" "$3" "$5"
  KVSPAN_STRESS_OPS=$PLANTED_OPS run "$1-$5" "$binary"
  must_report "$6"
}

must_pass() { # JOB FLAGS SYMBOL TEST OPERATIONS
  local binary
  binary=$(build_stress "$1" real "$2" "$4")
  check_binary "$binary" "$3" real
  KVSPAN_STRESS_OPS=$5 run "$1-$4-real" "$binary"
  must_be_silent 'test result: ok\. 1 passed' "$5"
}

address_job() {
  local flags=-Zsanitizer=address symbol=__asan_init
  local report="AddressSanitizer: heap-use-after-free"
  export ASAN_OPTIONS=$OPTIONS
  echo "== AddressSanitizer on the Rust stress test of layer caches"
  must_find address "$flags" $symbol stress use-after-free "$report"
  must_pass address "$flags" $symbol stress "$ASAN_OPS"
  echo "== AddressSanitizer on the Rust stress test of blocks"
  must_pass address "$flags" $symbol stress_blocks "$((ASAN_OPS / BLOCKS_SHARE))"
}

# The second flag allows to link the standard library, which is not instrumented.
THREAD_FLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer"
THREAD_REPORT="ThreadSanitizer: data race"

thread_options() { # SUPPRESSIONS
  export TSAN_OPTIONS="$OPTIONS suppressions=$PWD/$HERE/$1 print_suppressions=1"
}

thread_job() {
  local symbol=__tsan_init
  thread_options tsan.supp
  echo "== ThreadSanitizer on the Rust stress test of layer caches"
  must_find thread "$THREAD_FLAGS" $symbol stress unordered-length "$THREAD_REPORT"
  must_pass thread "$THREAD_FLAGS" $symbol stress "$TSAN_OPS"
  echo "== ThreadSanitizer on the Rust stress test of blocks"
  # Threads of a pool sleep under locks of the standard library, whose slow ways are not seen. So what
  # the threads of a pool share is watched by AddressSanitizer alone.
  export KVSPAN_STRESS_POOL=1
  must_find thread "$THREAD_FLAGS" $symbol stress_blocks unordered-unpin "$THREAD_REPORT"
  must_pass thread "$THREAD_FLAGS" $symbol stress_blocks "$((TSAN_OPS / BLOCKS_SHARE))"
}

run_python() { # TREE OPERATIONS
  local module=$OUT/package-$1/kvspan/_kvspan.abi3.so
  # The interpreter is not instrumented, so the runtime must be there before it.
  run "python-$1" env LD_PRELOAD="$RUNTIME" PYTHONPATH="$OUT/package-$1" OPENBLAS_NUM_THREADS=1 \
    "$VENV/bin/python" "$HERE/stress.py" "$2"
  in_log "^loaded: $module\$" || fail_with_log "$module was not loaded"
  check_binary "$module" __tsan_init "$1"
}

python_job() {
  echo "== ThreadSanitizer on the extension in CPython"
  thread_options tsan-python.supp
  build_package python unowned-array "$THREAD_FLAGS"
  run_python unowned-array "$PLANTED_OPS"
  must_report "$THREAD_REPORT"

  build_package python real "$THREAD_FLAGS"
  run_python real "$PYTHON_OPS"
  must_be_silent 'no token torn' "$PYTHON_OPS"
}

mkdir -p "$OUT"
# Two runs at once would build into each other's folders.
exec 9>"$OUT/lock"
flock 9

find_tools
[[ ${#MISSING[@]} == 0 ]] || install_tools
check_patches
OPTIONS="exitcode=$REPORTED halt_on_error=1 external_symbolizer_path=$SYMBOLIZER"
make_venv
address_job
thread_job
python_job
