"""Do Tatara's CUDA paths work on this GPU, and how fast? Under five minutes, nothing but torch and numpy is needed.

python -m benchmarks.gpu_check [--json FILE] [--quick] [--device cuda|cpu] [--section NAME ...]

Every section is a process of its own, so that a crash, a broken CUDA context or a hang ends that section alone. Each
figure is printed with its limit and verdict. Exit code 0: all that could run here passed; 1: something failed. With
`--device cpu` the sections that need a GPU are skipped, the others try this script itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import gpu_fp8, gpu_kernels, gpu_sections
from benchmarks.gpu_sections import Figure, Setting
from errors import ConfigRefused, exit_code_of
from files import write_whole
from parallel.waits import OUTSIDE, ROOT, project_place

State = Literal["running", "passed", "FAILED", "skipped"]
_SAYS = {True: "ok", False: "FAILED"}
_LINES = 3  # of what an error says


@dataclass(frozen=True)
class Section:
    """One question."""

    name: str
    """For --section."""
    run: Callable[[Setting], Iterator[Figure]]
    """Makes the figures."""
    needs_cuda: bool = False
    """Whether a CPU can answer it."""
    needs: tuple[str, ...] = ()
    """Packages besides torch and numpy."""
    timeout: int = 100
    """Seconds after which it hangs."""

    def why_not(self, setting: Setting) -> str | None:
        """Why it cannot run here, if so."""
        if self.needs_cuda and not setting.on_cuda:
            return "needs CUDA"
        missing = [each for each in self.needs if importlib.util.find_spec(each) is None]
        return f"needs {', '.join(missing)}" if missing else None


SECTIONS = (
    Section("parity", gpu_sections.parity),
    Section("speed", gpu_sections.speed, timeout=200),  # compiles
    Section("attention", gpu_kernels.attention),
    Section("experts", gpu_kernels.experts),
    Section("ring", gpu_kernels.ring, needs_cuda=True),
    Section("checkpoint", gpu_sections.checkpoint_stall, needs=("safetensors",)),
    Section("syncs", gpu_sections.host_syncs, needs_cuda=True),
    Section("fp8", gpu_fp8.fp8),
)


@dataclass
class Outcome:
    """What became of a section."""

    name: str
    """Which."""
    state: State = "running"
    """How it ended."""
    reason: str | None = None
    """Why it was skipped or broke off."""
    seconds: float = 0.0
    """How long it took, its process included."""
    figures: list[Figure] = field(default_factory=list)
    """Those made before the end."""

    def to_json(self) -> dict[str, Any]:
        """With each figure's verdict; what is no number is written in words, as JSON has no NaN."""
        figures = [
            asdict(each) | {"value": _plain(each.value), "passed": each.passed} for each in self.figures
        ]  # fmt: skip
        return {**vars(self), "figures": figures}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Outcome:
        """What `to_json` gave."""
        figures = [
            Figure(each["name"], float(each["value"]), each["unit"], each["limit"], each["sense"])
            for each in raw["figures"]
        ]
        return Outcome(raw["name"], raw["state"], raw["reason"], raw["seconds"], figures)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def environment(device: torch.device) -> dict[str, str | None]:
    """What the figures were made with; on CUDA this opens the device."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_cuda else None,
        "memory_gb": f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.1f}" if on_cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver() if on_cuda else None,
        "python": platform.python_version(),
        "transformer_engine": _version("transformer_engine"),
    }


def _driver() -> str | None:
    """Version of the GPU's driver, as nvidia-smi tells it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return told[0] if told else None


def _version(package: str) -> str | None:
    """Of an importable package, without importing it."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def line(figure: Figure) -> str:
    """A row of the table."""
    limit = "" if figure.limit is None else f"{figure.sense} {figure.limit:.4g}"
    verdict = "" if figure.limit is None and figure.passed else _SAYS[figure.passed]
    return f"  {figure.name:64s} {figure.value:12.5g} {figure.unit:8s} {limit:>10s}  {verdict}".rstrip()


def make(section: Section, setting: Setting, keep: Callable[[Outcome], None]) -> Outcome:
    """Run a section in this process; `keep` gets what there is after every figure."""
    outcome, begin = Outcome(section.name), time.perf_counter()
    torch.set_num_threads(gpu_sections.cpu_threads())
    print(f"{section.name}: {(section.run.__doc__ or '').splitlines()[0]}", flush=True)
    try:
        for figure in section.run(setting):
            outcome.figures.append(figure)
            print(line(figure), flush=True)
            keep(outcome)
        outcome.state = "passed" if all(each.passed for each in outcome.figures) else "FAILED"
    except Exception as error:  # whatever it is, the other sections are to run
        traceback.print_exception(error)
        outcome.state, outcome.reason = "FAILED", _words(error)
        print(f"  FAILED: {outcome.reason}", flush=True)
    outcome.seconds = time.perf_counter() - begin
    keep(outcome)
    gpu_sections.release()
    return outcome


def _words(error: Exception) -> str:
    """An error in a few lines: its kind, what it says, where."""
    stack = traceback.extract_tb(error.__traceback__)
    where = project_place(stack)
    if where == OUTSIDE:  # this script's own
        where = f"{Path(stack[-1].filename).name}:{stack[-1].lineno} in {stack[-1].name}"
    text = " ".join(str(error).splitlines()[:_LINES])
    return f"{type(error).__name__} at {where}: {text}"


def apart(section: Section, setting: Setting) -> Outcome:
    """Run a section in a process of its own."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "benchmarks.gpu_check", "--here", "--section", section.name,
            "--device", setting.device.type, "--json", str(file), *(["--quick"] if setting.quick else []),
        ]  # fmt: skip
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=section.timeout, check=False).returncode
            ended = f"its process ended with code {code}"
        except subprocess.TimeoutExpired:
            ended = f"it took longer than {section.timeout} s"
        raw = json.loads(file.read_text())["sections"] if file.is_file() else []
    outcome = Outcome.from_json(raw[0]) if raw else Outcome(section.name)
    if outcome.state == "running":  # it did not come to its end
        outcome.state, outcome.reason = "FAILED", ended
        print(f"  FAILED: {section.name}: {ended}", flush=True)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def skipped(section: Section, reason: str) -> Outcome:
    """Say why a section does not run."""
    print(f"{section.name}: skipped: {reason}", flush=True)
    return Outcome(section.name, "skipped", f"skipped: {reason}")


def check(sections: Sequence[Section], setting: Setting, here: bool, json_file: Path | None) -> list[Outcome]:
    """Run every section; `here`: in this process."""
    done: list[Outcome] = []

    def keep(current: Outcome) -> None:
        if json_file is not None:
            write(json_file, setting, [*done, current], None)

    for section in sections:
        reason = section.why_not(setting)
        if reason is not None:
            done.append(skipped(section, reason))
        else:
            done.append(make(section, setting, keep) if here else apart(section, setting))
    return done


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether nothing failed."""
    return all(each.state in ("passed", "skipped") for each in outcomes)


def write(file: Path, setting: Setting, outcomes: Sequence[Outcome], about: Mapping[str, str | None] | None) -> None:
    """The report as JSON, without `environment` while sections run."""
    report = {
        "environment": about, "device": setting.device.type, "quick": setting.quick, "passed": passed(outcomes),
        "sections": [each.to_json() for each in outcomes],
    }  # fmt: skip
    write_whole(file, json.dumps(report, indent=1, allow_nan=False) + "\n")


def summary(outcomes: Sequence[Outcome], about: Mapping[str, str | None]) -> None:
    """Print the verdicts, and once more what failed."""
    print("\n" + ", ".join(f"{name} {value}" for name, value in about.items() if value))
    for each in outcomes:
        bad = [figure for figure in each.figures if not figure.passed]
        reason = each.reason or (
            f"{len(bad)} of {len(each.figures)} figures" if bad else f"{len(each.figures)} figures"
        )
        print(f"{each.name:20s} {each.state:8s} {each.seconds:6.1f} s  {reason}")
        for figure in bad:
            print(line(figure))
    print("all that could run passed" if passed(outcomes) else "FAILED")


def chosen_device(asked: str | None) -> torch.device:
    """The one asked for, else a GPU where there is one."""
    here = torch.cuda.is_available()
    if asked == "cuda" and not here:
        raise ConfigRefused("--device cuda: torch finds no CUDA device here; write --device cpu, or look at nvidia-smi")
    return torch.device("cuda", 0) if asked == "cuda" or (asked is None and here) else torch.device("cpu")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repetitions")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="what to check (a GPU where there is one)")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--section", action="append", choices=names, help="only this one; may be given again")
    parser.add_argument("--here", action="store_true", help="all sections in this process, as for a debugger")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    options = arguments(argv)

    def run() -> int:
        if options.json and not options.json.resolve().parent.is_dir():
            raise ConfigRefused(f"--json {options.json}: its folder does not exist; make it, or name another file")
        setting = Setting(chosen_device(options.device), options.quick)
        sections = [each for each in SECTIONS if not options.section or each.name in options.section]
        outcomes = check(sections, setting, options.here, options.json)
        about = environment(setting.device)  # only now: until here no other process shares the device's memory
        if options.json:
            write(options.json, setting, outcomes, about)
        if not options.here or len(sections) > 1:
            summary(outcomes, about)
        return 0 if passed(outcomes) else 1

    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
