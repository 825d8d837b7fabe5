"""GPUs found from the kernel's files alone."""

import pytest
from hardware_trees import (
    CPU_NODE,
    GIB,
    H100,
    MI210,
    NODES,
    OLD_VEGA,
    R9700,
    Tree,
    denied,
    h100,
    mi210,
    mi300x_cpx,
    ryzen_ai_max,
)

from anyrig.hardware import amd, amd_targets, device_node, nvidia, nvml


def test_an_mi210_is_read_with_target_units_memory_and_bus(tmp_path):
    found = amd.read(mi210(tmp_path).root)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.gfx, gpu.units, gpu.wave) == ("Instinct MI210", "gfx90a", 104, 64)
    assert (gpu.bus, gpu.memory, gpu.render.path) == ("0000:63:00.0", 64 * GIB, "/dev/dri/renderD128")
    assert (gpu.index, gpu.partitions, gpu.apu) == (0, 1, False)
    assert gpu.uuid == f"GPU-{1801979520617338022:016x}"


def test_eight_partitions_are_one_chip_and_the_card_behind_is_another(tmp_path):
    gpus = amd.read(mi300x_cpx(tmp_path).root).gpus
    assert [gpu.partitions for gpu in gpus] == [8] * 8 + [1]
    assert [gpu.partition for gpu in gpus[:8]] == list(range(8))
    assert [gpu.index for gpu in gpus] == list(range(9))
    assert {gpu.name for gpu in gpus[:8]} == {"Instinct MI300X"}
    assert gpus[7].bus == "0000:05:00.7"
    assert sum(gpu.units for gpu in gpus[:8]) == 304


def test_nodes_are_numbered_by_value_not_by_spelling(tmp_path):
    gpus = amd.read(mi300x_cpx(tmp_path).root).gpus
    assert [gpu.node for gpu in gpus] == list(range(2, 11))


def test_an_apu_counts_shared_memory_and_not_the_carve_out(tmp_path):
    tree = ryzen_ai_max(tmp_path, shared=16364285952, carve_out=96 * GIB, memory=32 * GIB)
    (gpu,) = amd.read(tree.root).gpus
    assert gpu.gfx == "gfx1151" and gpu.apu and gpu.name == "Ryzen AI Max (Radeon 8060S)"
    assert gpu.memory == 16364285952
    assert gpu.carve_out == 96 * GIB
    assert amd.shared_memory_limit(tree.root) == pytest.approx(16364285952, abs=4096)


def test_an_r9700_has_64_units_of_two_simds_and_its_video_memory(tmp_path):
    (gpu,) = amd.read(Tree(tmp_path).node(1, R9700, (2, 34208743424)).root).gpus
    assert (gpu.name, gpu.gfx, gpu.units, gpu.wave) == ("Radeon AI PRO R9700", "gfx1201", 64, 32)
    assert gpu.memory == 34208743424
    assert gpu.uuid == "GPU-5bd3148dc76b831a"


def test_system_memory_banks_are_not_the_gpus(tmp_path):
    (gpu,) = amd.read(Tree(tmp_path).node(1, MI210, (0, 512 * GIB), (1, 32 * GIB), (2, 32 * GIB)).root).gpus
    assert gpu.memory == 64 * GIB


def test_an_old_kernel_that_names_no_target_leaves_an_unknown_card_unnamed(tmp_path):
    (gpu,) = amd.read(Tree(tmp_path).node(1, OLD_VEGA).root).gpus
    assert gpu.gfx is None and gpu.target is None
    assert gpu.name == "AMD GPU 0x6860"
    assert gpu.memory == 17163091968


def test_an_old_kernel_that_names_no_target_is_helped_by_the_pci_id(tmp_path):
    properties = {name: value for name, value in MI210.items() if name != "gfx_target_version"}
    (gpu,) = amd.read(Tree(tmp_path).node(1, properties, (1, 64 * GIB)).root).gpus
    assert gpu.gfx == "gfx90a" and gpu.gfx_from_table


def test_a_machine_without_gpu_has_none(tmp_path):
    tree = Tree(tmp_path).node(0, CPU_NODE)
    assert amd.read(tree.root).gpus == ()
    assert amd.read(tree.root).kfd.state == "missing"
    assert nvidia.read(tree.root).gpus == ()


def test_a_kfd_that_may_not_be_opened_leaves_the_gpus_known_but_unusable(tmp_path):
    found = amd.read(mi210(tmp_path).root, denied("/dev/kfd"))
    assert found.kfd.state == "denied" and found.kfd.group == "render"
    assert len(found.gpus) == 1 and found.usable == ()


def test_a_container_given_the_second_gpu_numbers_it_zero(tmp_path):
    tree = Tree(tmp_path).node(1, MI210, (1, 64 * GIB))
    tree.node(2, MI210 | {"drm_render_minor": 129, "unique_id": 7, "location_id": 26000}, (1, 64 * GIB))
    (tmp_path / "dev/dri/renderD128").unlink()
    assert [(gpu.node, gpu.index, gpu.render.state) for gpu in amd.read(tree.root).gpus] == [
        (1, None, "missing"),
        (2, 0, "ok"),
    ]


def test_nodes_that_device_rules_hide_are_counted(tmp_path):
    tree = mi210(tmp_path)
    # Reading a folder fails as reading a hidden node's file does, also for root.
    (tmp_path / NODES / "3/properties").mkdir(parents=True)
    assert amd.read(tree.root).hidden_nodes == 1


def test_lines_that_are_no_numbers_do_not_stop_the_reader(tmp_path):
    tree = mi210(tmp_path)
    file = tmp_path / NODES / "2/properties"
    file.write_text("oddity\nname with spaces\n" + file.read_text())
    assert amd.read(tree.root).gpus[0].gfx == "gfx90a"


def test_the_audio_function_of_a_card_is_not_a_gpu(tmp_path):
    tree = mi210(tmp_path).pci("0000:63:00.1", 0x1002, 0xAB28, 0x040300).pci("0000:03:00.0", 0x1002, 0x1478, 0x060400)
    assert [card.bus for card in amd.read(tree.root).pci_cards] == ["0000:63:00.0"]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (100300, "gfx1030"),
        (0, None),
    ],
)
def test_the_kernels_number_becomes_the_compilers_name(version, name):
    assert amd_targets.gfx_name(version) == name


@pytest.mark.parametrize(
    ("gfx", "device_id", "units", "memory", "name"),
    [
        ("gfx1100", 0x744C, 84, 20 * GIB, "Radeon RX 7900 XT"),
        ("gfx1100", 0x744C, 80, 16 * GIB, "Radeon RX 7900 GRE"),
        ("gfx1201", 0x7550, 64, 16 * GIB, "Radeon RX 9070 XT"),
        ("gfx1201", 0x7550, 56, 16 * GIB, "Radeon RX 9070"),
        ("gfx90a", 0x740C, 104, 64 * GIB, "Instinct MI250"),
        ("gfx90a", 0x740C, 110, 64 * GIB, "Instinct MI250X"),
        ("gfx942", 0x74A5, 304, 256 * GIB, "Instinct MI325X"),
    ],
)
def test_boards_of_one_id_are_told_apart_by_their_compute_units(gfx, device_id, units, memory, name):
    product = amd_targets.product(gfx, device_id, units, memory)
    assert product is not None and product.name == name


def test_every_target_of_the_table_is_complete_and_every_column_has_a_source():
    rows = amd_targets.targets()
    assert set(rows) == {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1200", "gfx1201", "gfx1151", "gfx1150"}
    assert {"specs", "fp8", "sdpa", "flash_attention", "paged_attention", "gptq"} <= set(amd_targets.sources())
    for target in rows.values():
        assert target.fp8 in ("none", "fnuz", "ocp") and target.wave == (64 if target.gfx.startswith("gfx9") else 32)
        assert target.products


def test_an_h100_is_read_from_the_drivers_files(tmp_path):
    found = nvidia.read(h100(tmp_path).root)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.bus, gpu.node.path) == ("NVIDIA H100 80GB HBM3", "0000:62:00.0", "/dev/nvidia5")
    assert gpu.uuid == "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"
    assert gpu.index == 0 and gpu.memory is None
    assert found.driver == "535.129.03"


def test_memory_comes_from_the_drivers_library_by_pci_address(tmp_path):
    answers = {"0000:62:00.0": nvml.Answer("NVIDIA H100 80GB HBM3", 80 * GIB, "9.0")}
    (gpu,) = nvidia.read(h100(tmp_path).root, ask=lambda: answers).gpus
    assert (gpu.memory, gpu.capability) == (80 * GIB, "9.0")


def test_without_a_driver_nobody_asks_its_library(tmp_path):
    def ask():
        raise AssertionError("asked")

    assert nvidia.read(Tree(tmp_path).root, ask=ask).gpus == ()


def test_an_excluded_gpu_is_listed_but_not_usable(tmp_path):
    tree = h100(tmp_path)
    tree.write("proc/driver/nvidia/gpus/0000:62:00.0/information", H100.replace("Excluded:\t No", "Excluded:\t Yes"))
    assert nvidia.read(tree.root).usable == ()


def test_the_open_kernel_modules_version_line_is_understood(tmp_path):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.84  Release Build  (root@host)\n"
    tree = Tree(tmp_path)
    tree.write("proc/driver/nvidia/version", line)
    assert nvidia.driver_version(tree.root) == "595.84"


def test_where_there_is_no_nvml_nothing_is_said():
    try:
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has NVML")
    except OSError:
        assert nvml.read() == {}


def test_a_device_file_names_the_group_that_may_open_it(tmp_path):
    tree = mi210(tmp_path)
    gid = (tmp_path / "dev/kfd").stat().st_gid
    tree.write("etc/group", f"other:x:{gid + 1}:\ngpu:x:{gid}:me\n")
    node = device_node.probe("/dev/kfd", tree.root)
    assert (node.state, node.gid, node.group) == ("ok", gid, "gpu")
    assert device_node.probe("/dev/nothing", tree.root).state == "missing"
