"""`anyrig doctor` as a user starts it, on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hardware_trees import build, denied, facts, mi210, mi300x_cpx
from rich.console import Console

from anyrig.cli import doctor as command
from anyrig.hardware import amd_targets
from anyrig.hardware import doctor as diagnosis

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "pyarrow", "huggingface_hub")


def run(*arguments, **environment):
    code = "from anyrig.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def imported(process):
    lines = (line for line in process.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_json_is_valid_and_complete_and_nothing_heavy_is_imported(tmp_path):
    process = run("--json", ANYRIG_HOME=str(tmp_path))
    report = json.loads(process.stdout)
    assert {"cpu", "devices", "torch", "findings"} <= set(report)
    assert report["cpu"]["cores"] >= 1
    assert process.returncode == (0 if report["ok"] else 1)
    assert imported(process) & set(HEAVY) == set()
    assert "anyrig" in imported(process)


def test_the_report_for_people_ends_with_the_verdict_and_is_plain_off_a_terminal(tmp_path):
    process = run(ANYRIG_HOME=str(tmp_path))
    lines = process.stdout.splitlines()
    assert [line for line in lines if line in ("Machine", "Devices", "Software", "Findings")] == [
        "Machine",
        "Devices",
        "Software",
        "Findings",
    ]
    assert lines[-1].startswith("anyrig can")
    assert "\x1b" not in process.stdout
    assert [line for line in lines if line != line.rstrip()] == []
    assert imported(process) & set(HEAVY) == set()


def test_a_problem_is_exit_code_1_and_comes_with_its_remedy(tmp_path):
    (tmp_path / "file").touch()
    process = run(ANYRIG_HOME=str(tmp_path / "file" / "home"))
    assert process.returncode == 1
    assert "cannot be written to" in process.stdout
    assert "Set ANYRIG_HOME" in process.stdout


def test_ops_lists_every_op_with_one_implementation_chosen(tmp_path):
    rows = json.loads(run("--ops", "--json", ANYRIG_HOME=str(tmp_path)).stdout)["ops"]
    chosen = [row["op"] for row in rows if row["chosen"]]
    assert sorted(chosen) == sorted({row["op"] for row in rows})
    assert all(row["reason"] for row in rows)


def shown(machine, capsys, width=100):
    command.show(machine, diagnosis.diagnose(machine), None, Console(width=width, color_system=None))
    return capsys.readouterr().out


def test_every_device_is_one_line_with_its_partition(tmp_path, capsys):
    text = shown(facts(mi300x_cpx(tmp_path), build("rocm")), capsys, width=200)
    assert sum("Instinct MI300X part" in line for line in text.splitlines()) == 8
    assert "part 8/8" in text and "gfx942" in text and "05:00.7  renderD135" in text


def test_remedies_follow_their_findings(tmp_path, capsys):
    text = shown(facts(mi210(tmp_path), build("rocm"), probe=denied("/dev/kfd")), capsys, width=200)
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines) if "/dev/kfd may not be opened" in line)
    assert lines[place].lstrip().startswith("problem")
    assert lines[place + 1].lstrip().startswith("-> sudo usermod -aG render")


def test_a_partitioned_card_takes_one_line_per_device_in_80_columns(tmp_path, capsys):
    text = shown(facts(mi300x_cpx(tmp_path), build("rocm")), capsys, width=80)
    assert sum("GPU " in line and "renderD" in line for line in text.splitlines()) == 9


@pytest.mark.parametrize("width", [60, 80])
def test_nothing_sticks_out_of_a_narrow_terminal(tmp_path, capsys, width):
    text = shown(facts(mi300x_cpx(tmp_path), build("cpu")), capsys, width=width)
    *report, _verdict = text.splitlines()
    assert max(map(len, report)) <= width


def test_the_documents_table_is_that_of_the_data():
    document = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    table = document.partition("<!-- targets: begin -->\n")[2].partition("<!-- targets: end -->")[0]
    assert table == amd_targets.markdown(), "run: python -m anyrig.hardware.amd_targets docs/doctor.md"
