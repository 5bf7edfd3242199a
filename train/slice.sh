#!/usr/bin/env bash
# Creates a TPU slice, trains a recipe on it, copies the draft to a storage bucket and deletes the slice.
# docs/tpu.md walks through it.
#
#   export TPU=my-slice ZONE=us-west4-a BUCKET=gs://my-bucket
#   train/slice.sh trial llava15_68m OPTIONS    # two steps, then deletes the slice
#   train/slice.sh walk llava15_68m OPTIONS     # all of it; run it again if this machine restarts
#   train/slice.sh create | set_up | state | delete
#   train/slice.sh on HOST COMMAND              # HOST is all, or 0, 1, ...; 0 is the first
#
# Optional: KIND, gcloud's options that choose the slice (by default a v5e-16); QUEUED=1, which waits
# for the slice in Google's queue; EXPORT, options of `jaxspec export`; DATA, the folder that every
# host copies ($BUCKET/data, or empty for none); EXTRAS, what pip installs (train,tpu,wandb); KEYS, a
# file of keys for the hosts, with lines such as HF_TOKEN=...
set -u
: "${TPU:?name the slice}" "${ZONE:?name its zone}" "${BUCKET:?name a bucket, as gs://NAME}"
: "${KIND:=--accelerator-type v5litepod-16 --version v2-alpha-tpuv5-lite}"
: "${EXPORT:=}" "${EXTRAS:=train,tpu,wandb}" "${KEYS:=}" "${QUEUED:=}" "${DATA=$BUCKET/data}"
if [ -n "$KEYS" ] && [ ! -r "$KEYS" ]; then
    echo "train/slice.sh: KEYS: no file that can be read; give one with lines such as HF_TOKEN=..." >&2
    exit 2
fi

# What every command on a host begins with. The keys are in a file: a command line can be listed.
environment="set -a; [ ! -f ~/keys ] || . ~/keys; JAX_COMPILATION_CACHE_DIR=$BUCKET/compiled; set +a"

thrice() { "$@" || { sleep 60; "$@"; } || { sleep 60; "$@"; }; }
on() { gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker "$1" --command "$environment; $2"; }
list() {
    if [ -n "$QUEUED" ]; then
        gcloud compute tpus queued-resources list --zone "$ZONE" --format 'value(name.basename(),state.state)'
    else
        gcloud compute tpus tpu-vm list --zone "$ZONE" --format 'value(name.basename(),state)'
    fi
}

# Prints READY, another state of gcloud's, NONE without a slice, or UNKNOWN if gcloud does not answer.
state() {
    local slices
    slices=$(thrice list) || { echo UNKNOWN; return; }
    echo "$slices" | awk -v name="$TPU" '
        $1 == name { state = $2 == "ACTIVE" ? "READY" : $2 } END { print state ? state : "NONE" }'
}

# A slice in the queue may take hours, and a request that has ended is deleted as a slice is.
create() {
    # shellcheck disable=SC2086  # several words
    if [ -n "$QUEUED" ]; then
        gcloud compute tpus queued-resources create "$TPU" --node-id "$TPU" --zone "$ZONE" \
            ${KIND//--version/--runtime-version} || return
        while case $(state) in *FAIL* | SUSPEND* | DELETING | NONE | READY) false ;; esac; do sleep 60; done
        [ "$(state)" = READY ]
    else
        gcloud compute tpus tpu-vm create "$TPU" --zone "$ZONE" $KIND
    fi
}

delete() {
    until [ "$(state)" = NONE ]; do
        if [ -n "$QUEUED" ]; then
            gcloud compute tpus queued-resources delete "$TPU" --zone "$ZONE" --force --quiet
        else
            gcloud compute tpus tpu-vm delete "$TPU" --zone "$ZONE" --quiet
        fi || sleep 60
    done
}

copy() { gcloud compute tpus tpu-vm scp "$1" "$TPU:$2" --zone "$ZONE" --worker all; }

# Copies this clone and the bucket's data to every host. Python 3.12, because pip gives older ones jax 0.10.
set_up() {
    local changes
    changes=$(git status --short)
    [ -z "$changes" ] || printf 'train/slice.sh: not committed, so not on the slice:\n%s\n' "$changes" >&2
    git archive --output jaxspec.tar HEAD && copy jaxspec.tar '' &&
        { [ -z "$KEYS" ] || copy "$KEYS" keys; } &&
        on all "
        touch keys && chmod 600 keys && mkdir -p data && tar -xf jaxspec.tar --one-top-level=jaxspec &&
        ${DATA:+gcloud storage cp --recursive $DATA/* data &&}
        for n in 1 2 3 4 5 6 7 8 9; do
            sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo apt-get update && break; sleep 20
        done &&
        sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.12-venv tmux &&
        cd jaxspec && python3.12 -m venv .venv &&
        .venv/bin/pip install -e '.[$EXTRAS]' -c constraints.txt gcsfs"
}

# In tmux, so that a lost connection does not end it. A file takes the recipe's words as they are.
train() {
    on all "cd jaxspec && { tmux has-session -t train 2> /dev/null || { rm -f train.exit && cat > train.sh << 'END' &&
$environment
.venv/bin/$recipe >> train.log 2>&1; echo \$? > train.exit
END
        tmux new-session -d -s train 'bash train.sh'; }; }"
}
training() { on 0 'tmux has-session -t train'; }
there() { case $(state) in READY | UNKNOWN) ;; *) false ;; esac; }

# Leaves the training's exit code in $code; fails without one after nine attempts in a row to reach the slice.
wait_for_end() {
    local _
    for _ in 1 2 3 4 5 6 7 8 9; do
        while code=$(on 0 'grep . jaxspec/train.exit 2> /dev/null || { tmux has-session -t train && echo running; }'); do
            [ "$code" = running ] || return "$code"
            sleep 60
        done
        there || return
        train
        sleep 60
    done
    false
}

# A training that crashed on one host has ended or waits on the others: it goes on from its checkpoints, once.
# Code 2 is an error that comes again, and 143 says that the slice is taken away.
wait_or_retry() {
    wait_for_end && return
    case $code in '' | running | 2 | 143) return 1 ;; esac
    there || return
    echo "train/slice.sh: training ended with code $code; it is tried once more" >&2
    on all 'tmux kill-session -t train; rm -f jaxspec/train.exit' && thrice train && wait_for_end
}

# Copies what the training wrote besides its checkpoints; data of this host only.
keep_log() {
    on 0 "cd jaxspec && rm -rf log && mkdir log && cp train.log log &&
        for file in runs/train/$name/*/metrics.jsonl runs/eval/*/table.md runs/eval/*/results.json; do
            [ ! -f \$file ] || cp --parents \$file log || exit
        done && gcloud storage cp --recursive log/* $BUCKET/log/$name-$(date -u +%Y%m%dT%H%M%S)/"
}

# JAX_PLATFORMS=cpu lets one host export: a command that touches the chips waits for the other hosts.
save() {
    on 0 "cd jaxspec && export JAX_PLATFORMS=cpu && rm -rf my-draft &&
        .venv/bin/jaxspec export runs/train/$name/hf my-draft $EXPORT &&
        gcloud storage cp --recursive my-draft $BUCKET"
}

trial() {
    local failed=0
    { [ "$(state)" = READY ] || create; } && set_up &&
        on all "cd jaxspec && .venv/bin/$recipe --debug" || failed=1
    delete
    return $failed
}

walk() {
    local failed
    while true; do
        code='' failed=0
        until [ "$(state)" = READY ]; do delete; create || sleep 60; done
        if ! { { training || { thrice set_up && thrice train; }; } && wait_or_retry && thrice save; }; then
            # 143: the training saved and left because the slice is taken away
            if [ "$code" = 143 ] || ! there; then delete; continue; fi
            on 0 'tail -n 30 jaxspec/train.log'
            failed=1
        fi
        thrice keep_log
        delete
        return $failed
    done
}

case ${1-} in
    walk | trial)
        name=${2:?name a recipe}
        recipe="python -m train.recipe $(printf '%q ' "${@:2}")--cluster auto"
        "$1"
        ;;
    on) on "${2:?name a host}" "${3:?give a command}" ;;
    create | set_up | state | delete) "$1" ;;
    *) echo "train/slice.sh: '${1-}' is no step; known: walk, trial, create, set_up, on, state, delete" >&2; exit 2 ;;
esac
