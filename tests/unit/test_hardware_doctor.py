"""The diagnosis of whole machines: which findings, with which remedy, and what the verdict says."""

from dataclasses import replace

import pytest
from hardware_trees import (
    CPU_NODE,
    GIB,
    MI210,
    OLD_VEGA,
    R9700,
    SYSTEMD_V2,
    Tree,
    build,
    denied,
    facts,
    h100,
    mi210,
    mi300x_cpx,
    ryzen_ai_max,
)

from anyrig.hardware import doctor
from anyrig.hardware.finding import Finding, size
from anyrig.hardware.torch_build import Deep, DeepDevice


def judge(*args, **kwargs):
    """Findings by name; the last one where a name comes twice."""
    return {finding.name: finding for finding in doctor.diagnose(facts(*args, **kwargs))}


def bad(findings):
    return {name: finding.state for name, finding in findings.items() if finding.state != "ok"}


def test_every_finding_that_is_not_ok_has_a_remedy_and_no_other_has_one():
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "warning", "It is slow.")
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "ok", "All well.", "Nothing to do.")


def test_a_machine_without_gpu_and_with_a_cpu_build_is_well(tmp_path):
    machine = facts(Tree(tmp_path).node(0, CPU_NODE), build("cpu"))
    findings = doctor.diagnose(machine)
    assert all(finding.state == "ok" for finding in findings)
    assert doctor.verdict(machine, findings).startswith("anyrig can run on the CPU: 8 cores, models up to about")


def test_an_mi210_with_a_rocm_build_is_well(tmp_path):
    machine = facts(mi210(tmp_path), build("rocm", targets=("gfx90a", "gfx942")))
    findings = doctor.diagnose(machine)
    assert [finding for finding in findings if finding.state != "ok"] == []
    assert "Instinct MI210 with 64.0 GiB" in doctor.verdict(machine, findings)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_amd_gpu_under_another_build_is_a_problem_with_the_index_to_use(tmp_path, kind):
    found = judge(mi210(tmp_path), build(kind))
    assert bad(found) == {"torch build": "problem"}
    assert "whl/rocm" in (found["torch build"].remedy or "")


def test_an_nvidia_gpu_under_a_rocm_build_is_a_problem(tmp_path):
    found = judge(h100(tmp_path), build("rocm"))
    assert found["torch build"].state == "problem" and "H100" in found["torch build"].sentence


def test_an_h100_under_a_cuda_build_is_well(tmp_path):
    machine = facts(h100(tmp_path), build("cuda"))
    findings = doctor.diagnose(machine)
    assert all(finding.state == "ok" for finding in findings)
    assert "H100" in doctor.verdict(machine, findings)


def test_a_cuda_build_on_a_machine_without_gpu_is_no_reason_to_complain(tmp_path):
    assert bad(judge(Tree(tmp_path), build("cuda"))) == {}


def test_a_closed_kfd_names_the_group_the_number_and_dockers_flags(tmp_path):
    found = judge(mi210(tmp_path), build("rocm"), probe=denied("/dev/kfd", "/dev/dri/renderD128"))
    assert bad(found) == {"kfd": "problem", "render nodes": "problem"}
    remedy = found["kfd"].remedy or ""
    assert "usermod -aG render" in remedy and "gid 109" in remedy
    assert "--device /dev/kfd --device /dev/dri --group-add 109" in remedy


def test_inside_a_container_the_remedy_is_dockers_and_a_nameless_group_goes_by_number(tmp_path):
    probe = denied("/dev/kfd", gid=993, group=None)
    found = judge(mi210(tmp_path), build("rocm"), probe=probe, container=True)
    assert "--group-add 993" in (found["kfd"].remedy or "") and "usermod" not in (found["kfd"].remedy or "")
    assert "gid 993" in found["kfd"].sentence


def test_a_missing_kfd_in_a_container_asks_for_the_device(tmp_path):
    tree = mi210(tmp_path)
    (tmp_path / "dev/kfd").unlink()
    found = judge(tree, build("rocm"), container=True)
    assert found["kfd"].remedy == "Start the container with --device /dev/kfd --device /dev/dri."


def test_a_container_that_was_given_one_of_two_gpus_is_well(tmp_path):
    tree = mi210(tmp_path).node(3, MI210 | {"drm_render_minor": 129, "unique_id": 9}, (1, 64 * GIB))
    (tmp_path / "dev/dri/renderD129").unlink()
    assert bad(judge(tree, build("rocm"), container=True)) == {}
    assert bad(judge(tree, build("rocm"), container=False)) == {"render nodes": "problem"}


def test_a_card_on_the_bus_without_compute_device_points_at_the_driver(tmp_path):
    found = judge(Tree(tmp_path).pci("0000:63:00.0", 0x1002, 0x740F, 0x038000), build("rocm"))
    assert found["amd driver"].state == "problem" and "0x740f at 0000:63:00.0" in found["amd driver"].sentence
    assert "modprobe amdgpu" in (found["amd driver"].remedy or "")


def test_partitions_are_counted_as_devices_of_their_chips(tmp_path):
    machine = facts(mi300x_cpx(tmp_path), build("rocm"))
    findings = doctor.diagnose(machine)
    assert "9 can be opened, partitions of 2 chips." in {finding.sentence for finding in findings}
    assert "9 × Instinct MI300X" in doctor.verdict(machine, findings)


def test_a_bios_carve_out_is_memory_lost(tmp_path):
    tree = ryzen_ai_max(tmp_path, shared=16364285952, carve_out=96 * GIB, memory=32 * GIB)
    found = judge(tree, build("rocm", "2.10.0", "7.1"))
    assert bad(found) == {"apu memory": "warning"}
    assert "96.0 GiB aside" in found["apu memory"].sentence and "ttm.pages_limit" in (found["apu memory"].remedy or "")


def test_a_limit_above_the_memory_there_is_gets_programs_killed(tmp_path):
    tree = ryzen_ai_max(tmp_path, shared=100663296000, carve_out=512 * 2**20, memory=61 * GIB)
    assert bad(judge(tree, build("rocm", "2.10.0", "7.1"))) == {"apu memory": "warning"}


def test_a_well_set_up_ryzen_ai_max_is_well(tmp_path):
    tree = ryzen_ai_max(tmp_path, shared=100663296000, carve_out=512 * 2**20, memory=122 * GIB)
    found = judge(tree, build("rocm", "2.10.0", "7.1"))
    assert bad(found) == {}
    assert "may take 93.8 GiB" in found["apu memory"].sentence


def test_a_target_whose_attention_is_experimental_in_this_torch_names_the_variable(tmp_path):
    tree = ryzen_ai_max(tmp_path, shared=60 * GIB, carve_out=0, memory=122 * GIB)
    switch = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    found = judge(tree, build("rocm", "2.9.1"))
    assert bad(found) == {"attention": "warning"} and switch in (found["attention"].remedy or "")
    assert bad(judge(tree, build("rocm", "2.9.1"), {switch: "1"})) == {}


def test_a_rocm_older_than_the_target_is_a_problem(tmp_path):
    found = judge(Tree(tmp_path).node(1, R9700, (1, 32 * GIB)), build("rocm", "2.8.0", "6.3.42131"))
    assert bad(found) == {"rocm version": "problem"} and "gfx1201" in found["rocm version"].sentence


def test_a_build_without_kernels_for_the_target_is_a_problem_and_leaves_the_cpu(tmp_path):
    machine = facts(mi210(tmp_path), build("rocm", targets=("gfx1100", "gfx942")))
    findings = doctor.diagnose(machine)
    assert [finding.name for finding in findings if finding.state == "problem"] == ["torch kernels"]
    assert "on the CPU (the GPU is not usable as things stand)" in doctor.verdict(machine, findings)


def test_an_old_kernel_and_a_card_that_nobody_supports_is_a_warning(tmp_path):
    found = judge(Tree(tmp_path).node(1, OLD_VEGA), build("cpu"))
    assert bad(found) == {"amd target": "warning"}


def test_an_office_gpu_beside_a_cpu_build_is_a_warning_not_a_problem(tmp_path):
    small = MI210 | {"gfx_target_version": 100306, "device_id": 0x164E, "simd_count": 4, "simd_per_cu": 2}
    found = judge(Tree(tmp_path).node(1, small, (1, GIB)), build("cpu"))
    assert bad(found) == {"amd target": "warning"} and "gfx1036" in found["amd target"].sentence
    machine = facts(Tree(tmp_path).node(1, small, (1, GIB)), build("cpu"))
    assert "not usable" not in doctor.verdict(machine, doctor.diagnose(machine))


def test_an_override_that_is_not_needed_is_to_be_unset(tmp_path):
    tree = ryzen_ai_max(tmp_path, shared=60 * GIB, carve_out=0, memory=122 * GIB)
    found = judge(tree, build("rocm", "2.10.0", "7.1"), {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert bad(found) == {"gfx override": "warning"} and "crash" in found["gfx override"].sentence
    assert bad(judge(Tree(tmp_path / "none"), build("cpu"), {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})) == {}


def test_contradicting_masks_are_a_problem_and_leave_no_gpu(tmp_path):
    environment = {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
    machine = facts(mi300x_cpx(tmp_path), build("rocm"), environment)
    findings = doctor.diagnose(machine)
    assert [finding.name for finding in findings if finding.state == "problem"] == ["ROCR and HIP masks"]
    assert "on the CPU" in doctor.verdict(machine, findings)


def test_masked_devices_are_not_promised(tmp_path):
    machine = facts(mi300x_cpx(tmp_path), build("rocm"), {"HIP_VISIBLE_DEVICES": "8,0"})
    assert [gpu.node for gpu in doctor.ready(machine)] == [2, 10]


def test_pynvml_beside_a_rocm_torch_is_a_trap(tmp_path):
    found = judge(mi210(tmp_path), build("rocm"), packages={"nvidia-ml-py": "12.575"})
    assert bad(found) == {"pynvml": "warning"} and found["pynvml"].remedy == "pip uninstall nvidia-ml-py"
    assert bad(judge(h100(tmp_path / "n"), build("cuda"), packages={"nvidia-ml-py": "12.575"})) == {}


def test_missing_device_files_of_nvidia_name_the_command(tmp_path):
    tree = h100(tmp_path)
    (tmp_path / "dev/nvidia-uvm").unlink()
    found = judge(tree, build("cuda"))
    assert bad(found) == {"nvidia devices": "problem"} and "nvidia-modprobe" in (found["nvidia devices"].remedy or "")


def test_a_quota_below_the_cores_is_a_warning_with_the_thread_count(tmp_path):
    tree = Tree(tmp_path, cores=64)
    tree.write("proc/self/mountinfo", SYSTEMD_V2)
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("sys/fs/cgroup/cpu.max", "400000 100000\n")
    found = judge(tree, build("cpu"))
    assert bad(found) == {"cores": "warning"} and "OMP_NUM_THREADS=4" in (found["cores"].remedy or "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compilers": {}}, {"compiler": "warning"}),
        ({"python": (3, 10, 4)}, {"python": "problem"}),
        ({"cache_free": GIB}, {"disk": "problem"}),
        ({"cache_free": 5 * GIB}, {"disk": "warning"}),
        ({"cache_writable": False}, {"disk": "problem"}),
        ({"shared_memory": 64 * 2**20}, {"shared memory": "warning"}),
        ({"environment": {"OMP_NUM_THREADS": "99"}}, {"threads": "warning"}),
    ],
)
def test_each_thing_amiss_with_the_machine_is_one_finding(tmp_path, changes, expected):
    machine = replace(facts(Tree(tmp_path), build("cpu")), **changes)
    assert bad({finding.name: finding for finding in doctor.diagnose(machine)}) == expected


def test_too_little_memory_is_a_problem(tmp_path):
    assert bad(judge(Tree(tmp_path, memory=2 * GIB), build("cpu"))) == {"memory": "problem"}


def test_a_cpu_without_avx2_is_a_problem(tmp_path):
    tree = Tree(tmp_path)
    tree.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: QEMU Virtual CPU\nflags\t\t: fpu sse2\n")
    assert bad(judge(tree, build("cpu"))) == {"instruction sets": "problem"}


def test_without_torch_nothing_runs_and_the_verdict_says_so(tmp_path):
    machine = facts(Tree(tmp_path), None)
    findings = doctor.diagnose(machine)
    assert "torch is missing" in doctor.verdict(machine, findings) and "1 problem" in doctor.verdict(machine, findings)


SEEN = DeepDevice("AMD Instinct MI210", "gfx90a", 64 * GIB, None)
DEEP = Deep(None, 4.0, "2.9.0", 8, "AVX512", ("gfx90a",), (SEEN,))


@pytest.mark.parametrize(
    ("deep", "expected"),
    [
        (DEEP, {}),
        (Deep("importing torch failed: ImportError: libamdhip64.so"), {"torch import": "problem"}),
        (replace(DEEP, version="2.8.0"), {"torch import": "problem"}),
        (replace(DEEP, devices=()), {"torch devices": "problem"}),
        (
            replace(DEEP, devices=(replace(SEEN, error="HIP error: invalid device function"),)),
            {"torch device 0": "problem"},
        ),
        (replace(DEEP, threads=64), {"torch threads": "warning"}),
    ],
)
def test_what_torch_really_sees_is_held_against_the_files(tmp_path, deep, expected):
    assert bad(judge(mi210(tmp_path), build("rocm"), deep=deep)) == expected


def test_the_json_report_keeps_its_keys(tmp_path):
    machine = facts(mi300x_cpx(tmp_path), build("rocm"))
    report = doctor.as_json(machine, doctor.diagnose(machine))
    assert {"ok", "verdict", "cpu", "kernels", "devices", "torch", "software", "findings"} == set(report)
    assert {"cores", "memory_available", "native_bf16", "instruction_sets"} <= set(report["cpu"])
    assert report["devices"][0]["arch"] == "gfx942" and report["devices"][0]["partitions"] == 8
    assert set(report["findings"][0]) == {"name", "state", "sentence", "remedy"}


@pytest.mark.parametrize(("count", "text"), [(64 * 2**20, "64 MiB"), (GIB * 3 // 2, "1.5 GiB"), (192 * GIB, "192 GiB")])
def test_sizes_are_written_for_people(count, text):
    assert size(count) == text
