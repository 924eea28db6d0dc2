#!/bin/sh
# Runs the model tests against several releases of Transformers, each in an environment of its own.
#
#   tests/run_versions.sh                    the oldest supported release, two between, and the newest
#   tests/run_versions.sh 5.6.0 5.17.0       these
#
# Environments are kept in build/transformers-<release>; an existing one is used as it is. TORCH chooses the torch.
set -eu
cd "$(dirname "$0")/.."
TORCH=${TORCH:-torch==2.13.0}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
failed=""
for release in ${*:-4.57.6 5.6.0 5.17.0 newest}; do
    environment=build/transformers-$release
    wanted="transformers==$release"
    [ "$release" = newest ] && wanted="transformers"
    if [ ! -e "$environment/ready" ]; then
        python3 -m venv "$environment"
        "$environment/bin/pip" install --quiet "$TORCH" # first, so that nothing chooses another torch
        "$environment/bin/pip" install --quiet "$wanted" accelerate gguf hypothesis ninja numpy pytest setuptools tqdm
        "$environment/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
        touch "$environment/ready"
    fi
    echo "== transformers $("$environment/bin/python" -c 'import transformers; print(transformers.__version__)')"
    "$environment/bin/python" -m pytest -q -p no:cacheprovider tests/test_generate_tiny.py \
        tests/test_cache_semantics.py tests/test_compile_generate.py tests/test_patch.py tests/test_memory.py \
        tests/test_devices.py tests/test_export.py || failed="$failed $release"
done
[ -z "$failed" ] || { echo "failed with transformers:$failed"; exit 1; }
