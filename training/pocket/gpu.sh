#!/bin/bash
# One call on a machine with GPUs, where nothing can be downloaded: trains from the shipped weights on all of them.
#
#     [INIT=FOLDER] training/pocket/gpu.sh OUT SECONDS [option of training.pocket.train …]
#
# OUT gets log.jsonl, and the model as parts of 12 MB, since machines may return small files only: here,
# `cat part_* > model.safetensors` and `tar xzf rest.tgz` make a folder that snugvl loads. Everything ends SECONDS after
# the start, sprites, words and compiling included. It needs `.pocket/`
# (python -m training.pocket.assets) and the repository around it. INIT: another folder to start from.
set -eu
out=$1 seconds=$2 now=$(date +%s)
shift 2
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export NCCL_NVLS_ENABLE=0 # NVLink multicast is not available on lent machines
gpus=$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')
# One core a GPU is the training's, the rest draw scenes. `nproc` would say OMP_NUM_THREADS, not the cores.
workers=$(python3 -c "import os; print(max(1, (len(os.sched_getaffinity(0)) - $gpus) // $gpus))")
echo "$gpus GPUs, $workers workers each"
# Batches travel through shared memory: some 10 MB each, three a worker.
df -m /dev/shm | tail -n 1
made=$(mktemp -d)
mkdir -p "$out"
status=0
timeout -k 3 $((seconds + 10)) python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    -m training.pocket.train --out "$made" --init "${INIT:-src/snugvl/pocket}" --until $((now + seconds - 6)) \
    --workers "$workers" --rate 0.0016 --warmup 100 --steady 0.2 --word-share 0.55 \
    --save-every 60 --check 0 --no-checkpoint --seed 11 "$@" || status=$?
cp "$made/log.jsonl" "$out"
split -b 12M "$made/model/model.safetensors" "$out/part_"
tar czf "$out/rest.tgz" -C "$made/model" --exclude model.safetensors .
exit $status
