#!/bin/sh
# The CUDA op tests under compute-sanitizer, in several processes at a time, over all GPUs there are. Takes minutes.
#
#   tests/run_compute_sanitizer.sh                            all tools, all op tests
#   TOOLS=racecheck JOBS=8 tests/run_compute_sanitizer.sh tests/test_merge.py
#
# What is looked for is how kernels access memory. Values are compared in ordinary runs: here the references, whose many
# small kernels a sanitizer watches too, are left out of AttentionCase.check (PAGED_KV_VALUES_COUNT=0), and long spans are
# shorter: racecheck makes accesses to shared memory some thousand times as slow.
#
# PYTHON chooses the interpreter, which needs torch with CUDA and the test extra. LOGS: a folder for what was printed.
# GPUS: numbers of those to use.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python} JOBS=${JOBS:-4} LOGS=${LOGS:-$(mktemp -d)}
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1 PAGED_KV_VALUES_COUNT=0
GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader)}

[ $# -gt 0 ] || set -- tests/test_cuda_ops.py tests/test_cuda_prefill.py tests/test_paged_attention.py \
    tests/test_reshape_and_cache.py tests/test_merge.py tests/test_block_ops.py tests/test_allocator.py \
    tests/test_eight_bit_ops.py
# Left out: pools of many gigabytes, 10^5 steps of the allocator, and more keys than the L2 cache holds: hours.
"$PYTHON" -m pytest "$@" -q --collect-only -p no:cacheprovider \
    -k "cuda and not past_32_bits and not equals_the_host and not test_long and not many_keys" |
    grep "::" >"$LOGS/tests"
grep -v replay "$LOGS/tests" | split -n "r/$JOBS" -d -a 2 - "$LOGS/part"
grep replay "$LOGS/tests" >"$LOGS/part_replay" || rm "$LOGS/part_replay"

failed=0
for tool in ${TOOLS:-memcheck racecheck initcheck}; do
    number=0
    # Shared memory is a kernel's own: only ours are watched. (A build without one of its barriers is found so, and not
    # with another name.)
    case $tool in racecheck) only="--kernel-name kns=paged_kv" ;; *) only= ;; esac
    for part in "$LOGS"/part*; do
        # Without torch's pool of memory each tensor is an allocation whose ends are known; captures need the pool.
        case $part in *replay) own=0 ;; *) own=1 ;; esac
        log="$LOGS/$tool.${part##*/}"
        gpu=$(echo $GPUS | cut -d " " -f $((number % $(echo $GPUS | wc -w) + 1)))
        CUDA_VISIBLE_DEVICES=$gpu PYTORCH_NO_CUDA_MEMORY_CACHING=$own \
            compute-sanitizer --tool "$tool" $only --log-file "$log.errors" \
            "$PYTHON" -m pytest -q -p no:cacheprovider "@$part" >"$log" 2>&1 || echo "exit $?" >>"$log" &
        number=$((number + 1))
    done
    wait
    for part in "$LOGS"/part*; do
        log="$LOGS/$tool.${part##*/}"
        echo "$tool ${part##*/}: $(tail -n 1 "$log"); $(grep -h SUMMARY "$log.errors" || echo no summary)"
        if grep -q "^exit" "$log" || ! grep -q SUMMARY "$log.errors" ||
            grep -qE "SUMMARY.*[1-9][0-9]* (error|hazard)" "$log.errors"; then failed=1; fi
    done
done
exit $failed
