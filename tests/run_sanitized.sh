#!/bin/sh
# Builds the CPU library with AddressSanitizer and UndefinedBehaviorSanitizer, apart from the usual one, and runs the op
# tests on it. The first finding ends the run.
#
#   tests/run_sanitized.sh                             every op test, each instruction set of this machine
#   tests/run_sanitized.sh tests/test_merge.py -x      these
#
# PYTHON chooses the interpreter, which needs torch and the test extra. The compiler is GCC.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
COMPILER=${CXX:-g++}
SANITIZED=$PWD/build/sanitized
PAGED_KV_SANITIZE=address,undefined PAGED_KV_CUDA=0 "$PYTHON" setup.py --quiet build --build-lib "$SANITIZED"

# Python leaks by design. Torch's own libraries are not instrumented, so what they alone do is not seen.
export LD_PRELOAD="$("$COMPILER" -print-file-name=libasan.so) $("$COMPILER" -print-file-name=libubsan.so)"
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1" UBSAN_OPTIONS="print_stacktrace=1"
export PYTHONPATH="$SANITIZED" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
cd tests # so that the package is found in PYTHONPATH and not in the source tree
"$PYTHON" -c "
import sys, torch_paged_kv
sys.exit(not torch_paged_kv.__file__.startswith('$SANITIZED') and f'the tests would use {torch_paged_kv.__file__}')"
if [ $# -eq 0 ]; then
    set -- test_paged_attention.py test_reshape_and_cache.py test_merge.py test_block_ops.py test_allocator.py
else
    for argument; do
        shift
        set -- "$@" "${argument#tests/}"
    done
fi
"$PYTHON" -m pytest -q -x -p no:cacheprovider -k "not without_kernels" "$@"
