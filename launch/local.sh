#!/usr/bin/env bash
# Trains on this host, or on several that see the same folders, with torchrun; ends with the run's own exit code.
set -u
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
program=local.sh
. launch/common.sh

usage="usage: bash launch/local.sh [options] [key=value ...]

  --nproc N             processes on this host (one a GPU that nvidia-smi lists, else 1)
  --nodes N             hosts (1); start the same command on each of them, with its own --node-rank
  --node-rank R         number of this host, from 0
  --master HOST[:PORT]  the host with number 0, as the others see it (port 29500)
  --restarts K          start again up to K times after a crash (0)
  --python PATH         the Python to use (.venv/bin/python, else python3)
  --config-dir DIR      a folder of your own YAML files

Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 and a lost terminal ask the run to save and end; a second one ends it at once.
Exit codes: 0 done, 2 configuration refused, 3 data or checkpoint refused, 4 diverged, 75 stopped on request."

refuse() {
  printf '%s\n\n%s\n' "$program: $1" "$usage" >&2
  exit 2
}

nproc='' nodes=1 node_rank='' master='' restarts=0 given_python='' pause=3
words=()
while (($#)); do
  case $1 in
    --nproc=* | --nodes=* | --node-rank=* | --master=* | --restarts=* | --python=* | --config-dir=* | -cd=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      continue
      ;;
    --nproc | --nodes | --node-rank | --master | --restarts | --python | --config-dir | -cd)
      (($# > 1)) || refuse "$1 needs a value"
      case $1 in
        --nproc) nproc=$2 ;;
        --nodes) nodes=$2 ;;
        --node-rank) node_rank=$2 ;;
        --master) master=$2 ;;
        --restarts) restarts=$2 ;;
        --python) given_python=$2 ;;
        *) words+=("$1" "$2") ;;
      esac
      shift
      ;;
    --help | -h)
      printf '%s\n' "$usage"
      exit 0
      ;;
    -*) refuse "unknown option $1" ;;
    *) words+=("$1") ;;
  esac
  shift
done

[[ $nodes =~ ^[1-9][0-9]*$ ]] || refuse "--nodes $nodes: a number of hosts is needed"
[[ $restarts =~ ^[0-9]+$ ]] || refuse "--restarts $restarts: a number is needed"
[[ -z $nproc || $nproc =~ ^[1-9][0-9]*$ ]] || refuse "--nproc $nproc: a number of processes is needed"
meeting=(--standalone)
if ((nodes > 1)); then
  [[ $node_rank =~ ^[0-9]+$ && $node_rank -lt $nodes ]] || refuse "--nodes $nodes needs --node-rank below $nodes"
  [[ $master =~ ^[^:]+(:[0-9]+)?$ ]] || refuse "--nodes $nodes needs --master HOST[:PORT], the host with number 0"
  port=29500
  [[ $master == *:* ]] && port=${master#*:}
  meeting=(--nnodes "$nodes" --node-rank "$node_rank" --master-addr "${master%%:*}" --master-port "$port")
fi

choose_python "$given_python"
if [[ -z $nproc ]]; then
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-}"
  nproc=${#gpus[@]} why='GPUs of CUDA_VISIBLE_DEVICES'
  if ((nproc == 0)); then nproc=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') why='GPUs, by nvidia-smi'; fi
  if ((nproc == 0)); then nproc=1 why='no GPU found'; fi
  say "--nproc $nproc ($why)"
fi

# A refused configuration is told by one process, with its code, which torchrun would turn into 1.
run=$("$python" -m launch.check --ranks "$((nodes * nproc))" "${words[@]}") || exit $?

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # what torchrun sets, less its warning; train.threads decides
trap 'on_signal SIGTERM' TERM
trap 'on_signal SIGINT' INT
trap 'on_signal SIGUSR1' USR1
trap 'on_signal SIGUSR2' USR2
trap 'on_signal SIGHUP' HUP

start() { # one start; sets code, or leaves it empty
  remember_status
  # A session of its own, so that the terminal's Ctrl-C reaches this script alone.
  setsid "$python" -m launch.torchrun "${meeting[@]}" --nproc-per-node "$nproc" --max-restarts 0 \
    train.py "${words[@]}" &
  wait_for $!
  read_outcome
  # On another host than rank 0's, its last word may be on the way.
  for ((second = 0; second < 15 && ended != 0 && ${node_rank:-0} > 0; second++)); do
    [[ -z $code ]] || break
    sleep 1
    read_outcome
  done
  code=${code:-$ended}
}

started=0
while true; do
  start
  is_final "$code" && break
  if [[ -n $asked ]] || ((started >= restarts)); then break; fi
  started=$((started + 1))
  say "ended with $code; start $started of at most $restarts more in $pause s"
  sleep "$pause" &
  wait_for $!
  [[ -z $asked ]] || break
done
withdraw_request
say "exit code $code: $(meaning "$code"); $run"
exit "$code"
