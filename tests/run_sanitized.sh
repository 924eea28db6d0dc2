#!/bin/sh
# Builds the CPU library with AddressSanitizer and UndefinedBehaviorSanitizer, apart from the usual one, and runs the op
# tests on it, once for each instruction set of this machine. The first finding ends the run.
#
#   tests/run_sanitized.sh                            all op tests
#   tests/run_sanitized.sh test_merge.py              these files of tests/
#   tests/run_sanitized.sh -m reliability ...         a module of the repository with its arguments instead of pytest
#
# PYTHON chooses the interpreter, which needs torch and the test extra. The compiler is GCC.
set -eu
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python}
COMPILER=${CXX:-g++}
SANITIZED=$(cd .. && pwd)/build/sanitized
(cd .. && PAGED_KV_SANITIZE=address,undefined PAGED_KV_CUDA=0 "$PYTHON" setup.py --quiet build --build-lib "$SANITIZED")

# Python leaks by design. Torch's own libraries are not instrumented, so what they alone do is not seen.
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1" UBSAN_OPTIONS="print_stacktrace=1"
ROOT=$(cd .. && pwd)
export PYTHONPATH="$SANITIZED:$ROOT" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
export PAGED_KV_TESTS_AGAIN=1 # no test starts a process of its own for another instruction set
sanitized() { # in tests/, so that the package is found in PYTHONPATH and not in the source tree
    LD_PRELOAD="$("$COMPILER" -print-file-name=libasan.so) $("$COMPILER" -print-file-name=libubsan.so)" "$PYTHON" "$@"
}
sanitized -c "
import sys, torch_paged_kv
sys.exit(not torch_paged_kv.__file__.startswith('$SANITIZED') and f'the tests would use {torch_paged_kv.__file__}')"

[ $# -gt 0 ] ||
    set -- test_paged_attention.py test_reshape_and_cache.py test_merge.py test_block_ops.py test_allocator.py \
        test_shared_prefixes.py
for capability in $(sanitized -c "import test_paged_attention; print(*test_paged_attention.AVAILABLE)"); do
    echo "== $capability"
    if [ "$1" = -m ]; then
        PAGED_KV_CPU_CAPABILITY=$capability sanitized "$@"
    else
        PAGED_KV_CPU_CAPABILITY=$capability sanitized -m pytest -q -x -p no:cacheprovider "$@"
    fi
done
