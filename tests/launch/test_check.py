"""The check before a start: the folder on stdout, or a refusal with its code."""

import subprocess
import sys

import pytest

from launch import check
from tests.conftest import ROOT


def test_the_folder_of_the_run_is_printed(tmp_path, capsys):
    assert check.main([f"run.dir={tmp_path / 'my runs'}", "run.name=one"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'my runs' / 'one'}\n", "")


@pytest.mark.parametrize(
    "words, said",
    [
        (["trian.steps=3"], "trian.steps=3"),
        (["--ranks", "3", "parallel.tp=2"], "parallel.tp=2"),
        (["--ranks", "none"], "--ranks none"),
        (["--ranks", "0"], "--ranks 0"),
        (["--rank", "2"], "--ranks"),
    ],
)
def test_a_refusal_is_told_with_exit_code_2(capsys, words, said):
    assert check.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err


def test_help_is_answered(capsys):
    assert check.main(["--help"]) == 0
    assert "--ranks N" in capsys.readouterr().out


def test_torch_is_not_imported():
    code = "import sys, launch.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
