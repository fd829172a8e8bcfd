#!/bin/bash
# never_oom.py on a GPU machine, its checkpoints made there first (random weights, the exact shapes).
#
#     benchmarks/never_oom_all.sh KIT OUT "2b-fp8 4b-fp8" [options of never_oom.py]
#     benchmarks/never_oom_all.sh .kit $OUT 8b-int4 --runs 3 --limit-s 100
#
# KIT: a folder with make_checkpoint.py, which writes Qwen3-VL in FP8, and a tokenizer/ of the family. PYTHONPATH
# must name this package and what it needs. Models: 2b-fp8, 4b-fp8, 8b-int4 (from an FP8 file), qwen3.5-4b
# (from bf16; the plan picks the format). Writes OUT/never_oom_MODELS.json and .txt.
set -u -o pipefail
kit=$1 out=$2 models=$3
shift 3
here=$(dirname "$0")
folder=${CHECKPOINTS:-/tmp/ck}
mkdir -p "$folder" "$out"
began=$SECONDS

make() { # name of the folder, then the command that fills it
    local target=$folder/$1
    shift
    [ -e "$target/done" ] || { "$@" "$target" >"$target.log" 2>&1 && touch "$target/done"; } || tail -5 "$target.log"
}
qwen3vl() { env -u PYTHONPATH python3 "$kit/make_checkpoint.py" --size "$1" --format fp8 --out "$2"; }
qwen35() { python3 "$here/random_checkpoint.py" Qwen/Qwen3.5-4B "$kit/tokenizer" "$1"; }

arguments=() makers=()
for model in $models; do
    case $model in
    2b-fp8 | 4b-fp8)
        make "$model" qwen3vl "${model%-fp8}" & makers+=($!)
        arguments+=("$model=$folder/$model:fp8")
        ;;
    8b-int4)
        make 8b-fp8 qwen3vl 8b & makers+=($!)
        arguments+=("8b-int4=$folder/8b-fp8:int4")
        ;;
    qwen3.5-4b)
        make qwen3.5-4b qwen35 & makers+=($!)
        arguments+=("qwen3.5-4b=$folder/qwen3.5-4b:auto")
        ;;
    *)
        echo "unknown model $model" && exit 2
        ;;
    esac
done
wait "${makers[@]}"
echo "checkpoints made in $((SECONDS - began)) s: $(du -sh "$folder" | cut -f1)"
name=never_oom_${models// /_}
python3 "$here/never_oom.py" "${arguments[@]}" --out "$out/$name.json" "$@" 2>&1 | tee "$out/$name.txt"
code=$?
echo "$((SECONDS - began)) s in all"
exit $code
