#!/usr/bin/env bash
# Creates a TPU slice, trains a recipe on it, copies the draft to a bucket and deletes the slice.
# docs/tpu.md walks through it.
#
#   export TPU=my-slice ZONE=us-west4-a BUCKET=gs://my-bucket
#   train/slice.sh trial llava15_68m OPTIONS    # two steps, then deletes the slice
#   train/slice.sh walk llava15_68m OPTIONS     # all of it; run it again if this machine restarts
#   train/slice.sh create | set_up | state | delete
#   train/slice.sh on HOST COMMAND              # HOST is all, or 0, 1, ...; 0 is the first
#
# Optional: KIND, gcloud's options that choose the slice (by default a v5e-16); EXPORT, options of
# `jaxspec export`; DATA, the folder that every host copies ($BUCKET/data, or empty for none); EXTRAS,
# what pip installs (train,tpu,wandb); KEYS, as "HF_TOKEN=... WANDB_API_KEY=...".
set -u
: "${TPU:?name the slice}" "${ZONE:?name its zone}" "${BUCKET:?name a bucket, as gs://NAME}"
: "${KIND:=--accelerator-type v5litepod-16 --version v2-alpha-tpuv5-lite}"
: "${EXPORT:=}" "${EXTRAS:=train,tpu,wandb}" "${KEYS:=}" "${DATA=$BUCKET/data}"

thrice() { "$@" || { sleep 60; "$@"; } || { sleep 60; "$@"; }; }
on() { gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker "$1" --command "$2"; }
list() { gcloud compute tpus tpu-vm list --zone "$ZONE" --format 'value(name.basename(),state)'; }

# Prints READY, another state of gcloud's, NONE without a slice, or UNKNOWN if gcloud does not answer.
state() {
    local slices
    slices=$(thrice list) || { echo UNKNOWN; return; }
    echo "$slices" | awk -v name="$TPU" '$1 == name { state = $2 } END { print state ? state : "NONE" }'
}

create() {
    # shellcheck disable=SC2086  # several words
    gcloud compute tpus tpu-vm create "$TPU" --zone "$ZONE" $KIND
}

delete() {
    until [ "$(state)" = NONE ]; do
        gcloud compute tpus tpu-vm delete "$TPU" --zone "$ZONE" --quiet || sleep 60
    done
}

# Copies this clone and the bucket's data to every host. Python 3.12, because pip gives older ones jax 0.10.
set_up() {
    git archive --output jaxspec.tar HEAD &&
        gcloud compute tpus tpu-vm scp jaxspec.tar "$TPU:" --zone "$ZONE" --worker all &&
        on all "
        mkdir -p data && tar -xf jaxspec.tar --one-top-level=jaxspec &&
        ${DATA:+gcloud storage cp --recursive $DATA/* data &&}
        for n in 1 2 3 4 5 6 7 8 9; do
            sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo apt-get update && break; sleep 20
        done &&
        sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.12-venv tmux &&
        cd jaxspec && python3.12 -m venv .venv &&
        .venv/bin/pip install -e '.[$EXTRAS]' -c constraints.txt gcsfs"
}

# In tmux, so that a lost connection does not end it.
train() {
    on all "cd jaxspec && { tmux has-session -t train 2> /dev/null || { rm -f train.exit &&
        tmux new-session -d -s train 'env $KEYS .venv/bin/$recipe > train.log 2>&1; echo \$? > train.exit'; }; }"
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

# JAX_PLATFORMS=cpu lets one host export: a command that touches the chips waits for the other hosts.
save() {
    on 0 "cd jaxspec && export JAX_PLATFORMS=cpu && rm -rf my-draft &&
        .venv/bin/jaxspec export runs/train/$name/hf my-draft $EXPORT &&
        gcloud storage cp --recursive my-draft $BUCKET"
}

trial() {
    local failed=0
    { [ "$(state)" = READY ] || create; } && set_up &&
        on all "cd jaxspec && env $KEYS .venv/bin/$recipe --debug" || failed=1
    delete
    return $failed
}

walk() {
    while true; do
        code=
        until [ "$(state)" = READY ]; do delete; create || sleep 60; done
        if { training || { thrice set_up && thrice train; }; } && wait_for_end && thrice save; then
            delete
            return
        fi
        # 143: the training saved and left because the slice is taken away
        if [ "$code" != 143 ] && there; then
            on 0 'tail -n 30 jaxspec/train.log'
            delete
            return 1
        fi
        delete
    done
}

case ${1-} in
    walk | trial)
        name=${2:?name a recipe}
        recipe="python -m train.recipe ${*:2} --cluster auto"
        "$1"
        ;;
    on) on "${2:?name a host}" "${3:?give a command}" ;;
    create | set_up | state | delete) "$1" ;;
    *) echo "train/slice.sh: '${1-}' is no step; known: walk, trial, create, set_up, on, state, delete" >&2; exit 2 ;;
esac
