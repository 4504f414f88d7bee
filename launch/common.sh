# shellcheck shell=bash disable=SC2034,SC2154  # variables that it shares with those who source it
# What local.sh and train.sbatch have in common; sourced by them, in the repository's folder.
# They set: program (the name that their lines begin with), run (the run's folder), python.

say() { printf '%s: %s\n' "$program" "$*" >&2; }

choose_python() { # the Python to start: the one given, else the repository's environment, else the system's
  python=$1
  if [[ -z $python && -x .venv/bin/python ]]; then python=$PWD/.venv/bin/python; fi
  python=${python:-python3}
}

# The attempt, code and step of status.json (code is empty while a run goes on), and a stamp that every writing of
# the file changes: a start that is refused early writes its code without counting a new attempt.
read_status() {
  local text='' file=$run/status.json
  attempt=0 code='' step=0 stamp=''
  [[ -f $file ]] || return 0
  text=$(<"$file") 2>/dev/null
  stamp=$(stat -c '%i %.9Y' -- "$file" 2>/dev/null)
  [[ $text =~ \"attempt\":\ *([0-9]+) ]] && attempt=${BASH_REMATCH[1]}
  [[ $text =~ \"code\":\ *([0-9]+) ]] && code=${BASH_REMATCH[1]}
  [[ $text =~ \"step\":\ *([0-9]+) ]] && step=${BASH_REMATCH[1]}
  return 0
}

remember_status() { # before a start
  read_status
  old_attempt=$attempt old_stamp=$stamp
}

read_outcome() { # after a start: its code, empty if it wrote none
  read_status
  ((attempt > old_attempt)) || [[ $stamp != "$old_stamp" ]] || code=''
}

ask_to_stop() { # the run saves after its step and ends with 75
  mkdir -p -- "$run" && : >"$run/stop" && asked=$1 && say "$1: asked the run to save and end ($run/stop)"
}

withdraw_request() { # a request is for one start: one that came too late must not stop the next
  if [[ -n $asked ]]; then rm -f -- "$run/stop"; fi
}

asked='' child='' # the signal that asked for an end; the process waited for

# shellcheck disable=SC2317  # called by traps
on_signal() { # the first asks the run to save and end, a second one ends its processes at once
  interrupted=1
  if [[ -z $asked ]]; then
    ask_to_stop "$1"
  elif [[ -n $child ]]; then
    say "$1 again: ending the processes"
    kill -TERM "$child" 2>/dev/null
  fi
}

wait_for() { # PID; a trapped signal ends bash's wait, and not the process: its code is asked for again
  local status
  child=$1 ended=''
  while
    interrupted=''
    wait "$1" 2>/dev/null
    status=$?
    [[ -n $ended && $status == 127 ]] || ended=$status # 127: it had been told already
    [[ -n $interrupted ]]
  do :; done
  child=''
}

is_final() { # codes after which the same command would only end in the same way, or was asked not to go on
  [[ $1 == 0 || $1 == 2 || $1 == 3 || $1 == 4 || $1 == 75 ]]
}

meaning() {
  case $1 in
    0) echo 'done, or paused at train.stop_at' ;;
    2) echo 'the configuration is refused' ;;
    3) echo 'data or a checkpoint is refused' ;;
    4) echo 'training diverged' ;;
    75) echo 'stopped on request, after saving; the same command goes on' ;;
    *) echo 'failed' ;;
  esac
}
